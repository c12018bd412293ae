"""Every error swarmnode raises on purpose, by whose fault it is and what it ends.

    SwarmError
    ├── LocalError                 this machine or its user; says what to do
    │   ├── UsageError             a wrong argument or setting                 ends the command
    │   │   └── MissingExtraError  a library that was not installed            ends the command
    │   ├── ModelFileError         a GGUF or shard that is broken or missing   ends the loading of that file
    │   ├── UnsupportedModelError  a sound file of a model we cannot run       ends the loading of that file
    │   ├── StoreError             disk full, no rights, locked cache folder   ends the write, nothing is lost
    │   ├── BudgetError            does not fit the byte budget                ends the request for memory
    │   ├── DeviceError            a ggml device that failed or lied           ends the use of that device
    │   │   └── NotFiniteError     a pass ended in NaN or infinity                ends one generation
    │   ├── ContextFullError       more tokens than the context holds          ends one generation
    │   └── EngineStoppedError     the backbone is shutting down               ends one generation
    └── RemoteError                a peer; never ends the node
        ├── HandshakeError         wrong key, network or bytes                 ends the connection, without an answer
        │   └── WrongNodeError     another node than the one dialled           and the address is none of that node's
        ├── ProtocolError          bytes that break docs/protocol.md           ends the connection
        ├── ConnectionLostError    the stream broke or was closed              ends the requests on it
        ├── RequestRefusedError    the peer said no, with a code and a reason  ends one request
        ├── BadReplyError          a well-formed answer with wrong content     ends one request, counts against the peer
        └── UnsuitableModelError   a model that this machine cannot serve      ends the sessions that are about it

`*_untrusted` functions take bytes from a peer or a file and raise exactly one of these.
"""

from __future__ import annotations


class SwarmError(Exception):
    """Base of everything raised on purpose."""


class LocalError(SwarmError):
    """This machine's, its files' or its user's fault; the message says what to do."""


class UsageError(LocalError):
    """A wrong argument or setting."""


class MissingExtraError(UsageError):
    """A library of an extra is not installed; the message says how to install it from the clone."""

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(
            f'{what} needs the extra `{extra}`: beside the clone run pip install "./swarmnode[{extra}]" '
            "(with the pip of the venv that swarmnode is in)"
        )


class ModelFileError(LocalError):
    """A GGUF (or a part, or a shard) that is missing, truncated or malformed; names the file."""


class UnsupportedModelError(LocalError):
    """The file is sound but holds a model this version cannot run."""


class StoreError(LocalError):
    """The cache folder could not be used: full, read-only, locked; names folder and option."""


class BudgetError(LocalError):
    """A request for weights does not fit the byte budget."""


class DeviceError(LocalError):
    """A ggml device is missing, failed or computes wrong results."""


class NotFiniteError(DeviceError):
    """The numbers of a pass are not finite: the model's file, the device or a worker's rows are at fault."""


class ContextFullError(LocalError):
    """A prompt or answer is longer than the context the backbone was started with."""


class EngineStoppedError(LocalError):
    """The engine does not run: the backbone is shutting down."""

    def __init__(self) -> None:
        super().__init__("the backbone is shutting down: ask again when it is back, or ask another one")


class RemoteError(SwarmError):
    """A peer's fault; ends at most the connection to it."""


class HandshakeError(RemoteError):
    """The peer has another key, network or protocol; closed without an answer."""


OTHER_NETWORK = "its network has another name or secret (--network, --secret)"
"""What a handshake that does not fit most often comes of."""


class WrongNodeError(HandshakeError):
    """The address reached a node with another key than the one that was dialled."""


class ProtocolError(RemoteError):
    """The peer broke the protocol; `code` is a name from docs/protocol.md."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason


class ConnectionLostError(RemoteError):
    """The stream to the peer ended before the answer came."""


class RequestRefusedError(RemoteError):
    """The peer refused one request; `code` is a name from docs/protocol.md."""

    def __init__(self, code: str, reason: str, retry_after_ms: int = 0) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason
        self.retry_after_ms = retry_after_ms


class BadReplyError(RemoteError):
    """The peer's answer has the wrong shape, or numbers that are not finite."""


class UnsuitableModelError(RemoteError):
    """The peer's model cannot be held or computed on this machine; another peer's may be."""


def first_error(error: BaseException) -> BaseException:
    """The error itself, or the first one in the (nested) group that a nursery made of it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
