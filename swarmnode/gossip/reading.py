"""How a core turns bytes into records: the step that a simulation of many cores does once for all of them. Pure."""

from __future__ import annotations

from typing import Protocol

from swarmnode.gossip.records import Envelope, Record, is_genuine, open_untrusted, read_envelope_untrusted


class RecordReader(Protocol):
    """How bytes become records. The simulator shares parsed records and remembers checked signatures."""

    def read_envelope_untrusted(self, data: bytes) -> Envelope:
        """The head. Raises ProtocolError."""
        ...

    def is_genuine(self, envelope: Envelope) -> bool:
        """Whether the signature is right."""
        ...

    def open_untrusted(self, envelope: Envelope) -> Record:
        """The whole record. Raises ProtocolError."""
        ...


class PlainReader:
    """Reads and checks everything, every time."""

    def read_envelope_untrusted(self, data: bytes) -> Envelope:
        return read_envelope_untrusted(data)

    def is_genuine(self, envelope: Envelope) -> bool:
        return is_genuine(envelope)

    def open_untrusted(self, envelope: Envelope) -> Record:
        return open_untrusted(envelope)
