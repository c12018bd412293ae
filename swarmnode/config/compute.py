"""Experts on a device, and the dense path of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from swarmnode.config.units import MIB

Repack: TypeAlias = Literal["auto", "always", "never"]
"""Which of the dense path's matrices are copied into the order that the CPU's kernels like best."""


@dataclass(frozen=True)
class ComputeConfig:
    """How experts are computed and checked."""

    n_threads: int = 0
    """0: the cores this process may use."""
    poll: int = 0
    """0..100: how long idle threads of ggml's pool spin before they sleep. Several workers on one machine must not spin
    against each other; waking costs 20-30 us a graph (docs/decisions/0002-ggml-build.md)."""
    graph_cache_bytes: int = 16 * MIB
    """Work memory of a bank's cached graphs: single rows of 48 layers with 8 experts each at n_embd 3,072, n_ff 1,024
    take 14 MB."""
    worker_graph_cache_bytes: int = 4 * MIB
    """The same for a worker: a graph of 64 pairs takes 1.6 MB, that of a decode step's few 0.2 MB."""
    worker_cpu_rows: int = 64
    """Most (row, expert) pairs in one graph of a worker's CPU; requests of up to max_rows pairs are computed in pieces
    of this size, sorted by expert. 512 pairs of 24 experts take 90 ms on two cores either way, and 1.6 MB at n_embd
    3,072 instead of 12.6 MB."""
    slots_per_range: int = 1024
    """Most experts of a shape in one tensor of a bank with a budget on the CPU: any pairs of them are one graph. ggml
    looks at all its slots in each graph, and lists pairs in 8 bytes a slot and pair (for 64 pairs 0.5 MB, of which it
    touches what it lists). 0: segments that grow, as on other devices."""
    self_test_widths: tuple[int, ...] = (1, 8, 9, 16, 64, 256, 512)
    max_rows: int = 512
    """Most (row, expert) pairs in one request to a worker, and in one ggml graph of it; more are computed in pieces."""
    backbone_max_rows: int = 4096
    """The same on a backbone, which can spare the memory: 512 tokens with 8 experts each (100 MB at n_embd 3,072)."""


@dataclass(frozen=True)
class ModelsConfig:
    """The dense path of a model on the backbone (models/)."""

    n_ubatch: int = 512
    """Most tokens of a prompt in one graph, as llama.cpp's default: larger costs memory, smaller costs speed."""
    max_tentative_tokens: int = 32
    """Most tokens of a pass that may be taken back. What is kept of each until then takes 50 KB a recurrent layer at
    the real sizes: 57 MB with 36 of them."""
    repack: Repack = "auto"
    """`auto`: of types whose results do not depend on it who else is in a pass, if there is memory for the copies;
    `always`: of all types (docs/decisions/0038-tuning.md)."""
    repack_memory_share: float = 0.5
    """Of the memory that is available, what `auto` takes at most. The file's own pages can go meanwhile."""
    kv_pad: int = 256
    """Attention looks at a multiple of this many KV cells, so that a graph serves 256 tokens before the next one."""
    mtp: bool = True
    """Whether a model's MTP block is loaded, if its file has one, so that `Model.draft` can guess. It takes the
    KV cache of one more layer with full attention a slot (2 KB a token at the real sizes), and the last layer is run
    for all tokens of a prompt."""
    mtp_fill_tokens: int = 32
    """So many tokens at most may be missing in the block's KV cache: entered together they cost one reading of three
    of its matrices, and until then a hidden state each, 12 KB."""
    max_prompt_chars: int = 8 * MIB
    """Longest text a chat template may give: 32 characters for each of the 262,144 tokens of a context."""
    template_compile_s: float = 10.0
    """Of CPU time, where the system counts it: compiling a chat template (100 KB: 0.2 s)."""
    template_render_s: float = 3.0
    """CPU time of the longest rendering: 8 MB of messages take 0.1 s. A template that loops for ever delays a SIGTERM
    by as much."""
    template_memory_bytes: int = 512 * MIB
    """Address space of the process that renders chat templates: a Python with 8 MB of messages in several copies."""
