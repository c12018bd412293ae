"""Decisions: frozen views in, plans out. No I/O, no clock, no live objects (docs/architecture.md)."""
