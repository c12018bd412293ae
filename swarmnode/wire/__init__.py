"""Bytes to events and back, without I/O, clock or trio: frames, messages, handshake, sealed records, the state machine.

The registry of all that travels is `constants.py` (numbers) and `messages.py` (fields); docs/protocol.md shows it.
"""
