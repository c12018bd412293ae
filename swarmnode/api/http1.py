"""HTTP/1.1 as the API speaks it: one request at a time, no other protocol. Pure: bytes and events, no I/O."""

from __future__ import annotations

import h11

_OTHER_PROTOCOLS = frozenset({b"upgrade", b"http2-settings"})


class PlainHttp(h11.Connection):
    """h11's server side without what nothing here needs, and what servers above it get wrong.

    * `Upgrade` is ignored, as a server may (RFC 9110, 7.8): no WebSocket, no HTTP/2. The preface of the latter has
      status 505, CONNECT 501.
    * What arrives behind a request that is not answered yet waits. h11 would say PAUSED, servers then stop reading, and
      nobody would hear that a client has gone.
    """

    def __init__(self, max_head_bytes: int) -> None:
        """A request line with its headers has `max_head_bytes` bytes at most; longer ones have status 431."""
        super().__init__(h11.SERVER, max_incomplete_event_size=max_head_bytes)
        self._is_last = False

    @property
    def is_answering(self) -> bool:
        """Whether all of a request is there, and it is not answered yet."""
        return self.their_state is h11.DONE

    @property
    def has_more(self) -> bool:
        """Whether there are bytes of another request."""
        return bool(self.trailing_data[0])

    @property
    def can_say_last(self) -> bool:
        """Whether the head of the answer is still to come, which can say that the connection ends with it."""
        return self.our_state is h11.SEND_RESPONSE

    def end_with_this_answer(self) -> None:
        """Answer nothing behind it, as a server may (RFC 9112, 9.3.2: who sends requests ahead has to repeat them)."""
        self._is_last = True

    def receive_data(self, data: bytes) -> None:
        """Bytes of the client; b"" says nothing, as whoever reads knows better whether it has gone."""
        if data:
            super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next part of the request, NEED_DATA, never PAUSED. RemoteProtocolError for what is not HTTP/1."""
        event = super().next_event()
        if event is h11.PAUSED:
            return h11.NEED_DATA
        return _plain(event) if isinstance(event, h11.Request) else event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """What `send` sends of an answer; its head says so if the connection ends with it."""
        if self._is_last and isinstance(event, h11.Response):
            headers = [item for item in event.headers if item[0] != b"connection"]
            event = h11.Response(status_code=event.status_code, headers=[*headers, (b"connection", b"close")])
        return super().send_with_data_passthrough(event)

    def start_next_cycle(self) -> None:
        """Ready for another request; LocalProtocolError if the connection has to end."""
        if self._is_last:
            raise h11.LocalProtocolError("too much was sent ahead")
        super().start_next_cycle()


def _plain(request: h11.Request) -> h11.Request:
    if request.http_version not in (b"1.0", b"1.1"):
        raise h11.RemoteProtocolError("only HTTP/1 is served", error_status_hint=505)
    if request.method == b"CONNECT":
        raise h11.RemoteProtocolError("this is no proxy", error_status_hint=501)
    if not any(name in _OTHER_PROTOCOLS for name, _ in request.headers):
        return request
    return h11.Request(
        method=request.method,
        target=request.target,
        headers=[item for item in request.headers if item[0] not in _OTHER_PROTOCOLS],
        http_version=request.http_version,
    )
