"""Opens and runs tiny models whose metadata lies; run by test_lying_files in a process that ggml may abort.

Two kinds: a sound file with one or two values replaced, and files of random sizes that agree with themselves, which get
past the checks of shapes to the ops. Prints each case before it is tried, and then what came of it.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from swarmnode.compute.devices import Device, open_device
from swarmnode.config import ModelsConfig
from swarmnode.errors import DeviceError, LocalError
from swarmnode.models.base import ExpertCall, F32Array, Model, Part, run_pass
from swarmnode.models.registry import open_model
from swarmnode.models.tokenizer import Tokenizer
from swarmnode.testing.tiny_gguf import TinyModel, write_tiny_gguf
from swarmnode.weights.index import ModelIndex

TINY = TinyModel(
    n_embd=32,
    n_layer=2,
    n_expert=4,
    n_ff=32,
    n_ff_shared=32,
    head_dim=16,
    state_size=16,
    full_attention_interval=2,
    mtp_block=True,
)
N_SLOTS = 3
A = "qwen35moe."
T = "tokenizer.ggml."
KEYS = (
    *(
        f"{A}attention.{name}"
        for name in ("head_count", "head_count_kv", "key_length", "value_length", "scale")
    ),
    *(
        f"{A}attention.{name}"
        for name in ("layer_norm_rms_epsilon", "recurrent_layers", "sliding_window", "causal")
    ),
    *(f"{A}rope.{name}" for name in ("dimension_count", "dimension_sections", "freq_base", "scaling.type")),
    *(
        f"{A}ssm.{name}"
        for name in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")
    ),
    *(f"{A}expert_{name}" for name in ("gating_func", "weights_norm", "weights_scale", "group_count")),
    *(f"{A}{name}" for name in ("context_length", "full_attention_interval", "feed_forward_length")),
    f"{A}expert_shared_feed_forward_length",
    *(f"{T}{name}" for name in ("model", "pre", "tokens", "token_type", "merges", "add_bos_token")),
    *(f"{T}{name}" for name in ("bos_token_id", "eos_token_id", "eot_token_id")),
)
NUMBERS = (
    -(2**63),
    -1,
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    15,
    16,
    17,
    31,
    32,
    63,
    64,
    255,
    4096,
    2**24,
    2**31,
    2**32 - 1,
    2**64 - 1,
)
FLOATS = (
    float("nan"),
    float("inf"),
    -float("inf"),
    0.0,
    -0.0,
    1e-45,
    1e-30,
    1e-6,
    0.5,
    1.0,
    1e4,
    1e12,
    3e38,
    1e300,
)
OTHERS = (True, False, "", "none", "4", "gpt2", "x" * 100_000, ("a", "b"), (), None)


def any_value(rng: random.Random, like: object) -> Any:
    """Of any GGUF type, as ModelIndex.metadata has it; of the kind of `like` every other time."""
    makers: dict[type, Callable[[], Any]] = {
        str: lambda: rng.choice(OTHERS),
        bool: lambda: rng.choice((True, False)),
        int: lambda: rng.choice(NUMBERS),
        float: lambda: rng.choice(FLOATS),
        np.ndarray: lambda: any_array(rng),
    }
    kind = type(like) if type(like) in makers and rng.random() < 0.5 else rng.choice(list(makers))
    return makers[kind]()


def any_array(rng: random.Random) -> Any:
    n = rng.choice((0, 1, 2, 3, 4, 5, 9))
    if rng.random() < 0.6:
        return np.array([rng.choice((0, 1, 2, 3, 4, 8, 11, 64, 2**31 - 1)) for _ in range(n)], np.int32)
    if rng.random() < 0.5:
        return np.array([rng.random() < 0.5 for _ in range(n)], bool)
    return np.array([rng.choice(FLOATS) for _ in range(n)])


def random_sizes(rng: random.Random) -> TinyModel:
    """Sizes that fit each other, odd ones among them."""
    n_k_heads, n_head_kv = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3))
    return replace(
        TINY,
        n_embd=rng.choice((1, 2, 3, 8, 32, 33)),
        n_expert=rng.choice((1, 2, 3, 5)),
        n_expert_used=1,
        n_ff=rng.choice((1, 2, 7, 32)),
        n_ff_shared=rng.choice((1, 3, 32)),
        n_head=n_head_kv * rng.choice((1, 2, 3)),
        n_head_kv=n_head_kv,
        head_dim=rng.choice((2, 4, 6, 10, 14, 16, 18, 34, 62, rng.randrange(1, 64))),
        n_k_heads=n_k_heads,
        n_v_heads=n_k_heads * rng.choice((1, 2, 3)),
        state_size=rng.choice((1, 2, 3, 5, 8, 16, 17)),
        fused_qkv=rng.random() < 0.5,
        tied_embeddings=rng.random() < 0.5,
        mtp_own_head=rng.random() < 0.3,
    )


def rope_lies(rng: random.Random, head_dim: int) -> dict[str, Any]:
    """Rotations that the head may be too small for."""
    n_rot = rng.choice((2, head_dim, head_dim, head_dim // 4 * 2 or 2, head_dim + 2))
    sizes = (0, 0, 0, 1, 1, n_rot // 6, n_rot // 4, n_rot // 2, head_dim // 2, head_dim)
    return {
        f"{A}rope.dimension_count": n_rot,
        f"{A}rope.dimension_sections": np.array(
            [rng.choice(sizes) for _ in range(rng.choice((3, 4)))], np.int32
        ),
        f"{A}rope.freq_base": rng.choice((1.0, 1e4, 1e12)),
        f"{A}attention.layer_norm_rms_epsilon": rng.choice((1e-30, 1e-6, 1.0)),
    }


def cases(
    folder: Path, rng: random.Random, n_lies: int, n_shapes: int
) -> Iterator[tuple[Path, str, dict[str, Any]]]:
    sound = write_tiny_gguf(folder / "sound.gguf", TINY)
    yield sound, "sound", {}
    with ModelIndex.open(sound) as index:
        truth = dict(index.metadata)
    for _ in range(n_lies):
        keys = rng.sample(KEYS, rng.choice((1, 1, 2)))
        lies = {key: any_value(rng, truth.get(key)) for key in keys}
        yield sound, "lies", lies
    for number in range(n_shapes):
        sizes = random_sizes(rng)
        path = write_tiny_gguf(folder / f"{number % 2}.gguf", sizes)
        yield path, str(asdict(sizes)), rope_lies(rng, sizes.head_dim)


def try_out(path: Path, lies: dict[str, Any], device: Device) -> str:
    """What came of it, in a word. What is raised but a LocalError ends the process."""
    with ModelIndex.open(path) as index:
        index.metadata = {**index.metadata, **lies}
        try:
            Tokenizer(index.metadata)
            n_ctx = 2 if f"{A}context_length" in lies else 128
            model = open_model(index, device, n_ctx, N_SLOTS, ModelsConfig(n_ubatch=96))
        except LocalError as error:
            return f"{type(error).__name__} {error}"[:300]
        try:
            run_all_ways(model)
        except DeviceError as error:
            return f"DeviceError {error}"
        finally:
            model.close()
    return "runs"


def run_all_ways(model: Model) -> None:
    """A pass of each kind: they have graphs of their own. DeviceError."""

    def routed(call: ExpertCall) -> F32Array:
        return call.rows

    if model.n_ctx == 2:
        run_pass(model.forward_batch([Part(slot, [3], 1) for slot in range(N_SLOTS)]), routed)
        list(islice(model.draft(0, 3), 2))
        return
    for tokens in ([3] * 70, [4]):  # 64 and more take another way through flash attention
        run_pass(model.forward(0, tokens), routed)
    draft = Part(1, [3, 4, 3], 3, tentative=True)
    run_pass(model.forward_batch([Part(0, [5], 1), draft, Part(2, [3], 1)]), routed)
    model.accept(1, 2)
    run_pass(model.forward_batch([Part(slot, [3], 1) for slot in range(N_SLOTS)]), routed)
    for slot in range(N_SLOTS):
        list(islice(model.draft(slot, 3), 2))
        model.restore(slot, model.checkpoint(slot))
        model.reset(slot)


def main(folder: Path, seed: int, n_lies: int, n_shapes: int) -> None:
    device = open_device("CPU", 1)
    for path, what, lies in cases(folder, random.Random(seed), n_lies, n_shapes):
        print("case", what, str(lies)[:500], flush=True)
        print("->", try_out(path, lies, device).replace("\n", " "), flush=True)
    device.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(argument) for argument in sys.argv[2:]))
