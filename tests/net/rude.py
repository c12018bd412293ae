"""A peer that knows the protocol and does not keep to it: handshakes honestly, then sends what it likes."""

from __future__ import annotations

import trio

from swarmnode.net.address import PeerAddress
from swarmnode.net.transport import Transport
from swarmnode.wire.connection import Connection
from swarmnode.wire.endpoint import Endpoint
from swarmnode.wire.events import Ended, Event, Opened


class Rude:
    """An open connection without a SecureStream round it."""

    def __init__(self, stream: trio.abc.Stream, connection: Connection) -> None:
        self.stream = stream
        self.connection = connection
        self.events: list[Event] = []

    @classmethod
    async def dial(cls, transport: Transport, address: PeerAddress, endpoint: Endpoint) -> Rude:
        """Connect and go through handshake and settings like anybody else."""
        stream = await transport.connect(address.host, address.port)
        rude = cls(stream, Connection.dialer(endpoint, address.node_id))
        while not any(isinstance(event, Opened) for event in rude.events):
            await rude.flush()
            await rude.receive()
        return rude

    async def flush(self) -> None:
        """Send what the honest half has to say."""
        if data := self.connection.data_to_send(64 * 1024):
            await self.stream.send_all(data)

    async def receive(self) -> bool:
        """Read once; False at the end of the stream."""
        try:
            data = await self.stream.receive_some(64 * 1024)
        except trio.BrokenResourceError:
            data = b""
        self.events += self.connection.receive_data(data) if data else self.connection.receive_eof()
        return bool(data)

    async def send_raw(self, plain: bytes) -> None:
        """Seal and send a record that no honest connection writes."""
        writer = self.connection._writer
        assert writer is not None
        await self.stream.send_all(writer.seal(plain))

    async def last_words(self) -> str:
        """Read to the end and hang up; the code of the peer's bye, or `ended` if it said none."""
        while await self.receive():
            pass
        await self.stream.aclose()
        return next(event.code for event in self.events if isinstance(event, Ended))
