"""A reader of records that many simulated cores share: each record is parsed, and its signature checked, once."""

from __future__ import annotations

from swarmnode.gossip.records import Envelope, Record, is_genuine, open_untrusted, read_envelope_untrusted


class SharedReader:
    """Reads every record once. A forged one stays forged."""

    def __init__(self) -> None:
        self._envelopes: dict[bytes, Envelope] = {}
        self._genuine: dict[bytes, bool] = {}
        self._records: dict[bytes, Record] = {}

    def read_envelope_untrusted(self, data: bytes) -> Envelope:
        """As records.read_envelope_untrusted."""
        found = self._envelopes.get(data)
        if found is None:
            found = self._envelopes[data] = read_envelope_untrusted(data)
        return found

    def is_genuine(self, envelope: Envelope) -> bool:
        """As records.is_genuine."""
        found = self._genuine.get(envelope.digest)
        if found is None:
            found = self._genuine[envelope.digest] = is_genuine(envelope)
        return found

    def open_untrusted(self, envelope: Envelope) -> Record:
        """As records.open_untrusted."""
        found = self._records.get(envelope.digest)
        if found is None:
            found = self._records[envelope.digest] = open_untrusted(envelope)
        return found
