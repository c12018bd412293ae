"""The largest models this version takes, from a file or from a peer's manifest."""

from __future__ import annotations

MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 16
"""Expert ids travel as u16."""
MAX_WIDTH = 1 << 16
"""Largest n_embd and n_ff: rows on the wire are at most as wide, and a worker's memory for rows is bounded by it."""
MAX_SLAB_BYTES = 1 << 30
"""One expert's part of one tensor; 2.6 MB in a 122B model."""
