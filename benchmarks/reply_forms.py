"""What each reply form and encoding does to the logits: the bundled model, every routed row over three workers.

    python -m benchmarks.reply_forms

One process, memory network. Prints for each text the cosine of all its logits with those of a run without workers, the
lowest cosine of a single token, the largest difference, and how often the most probable token is the same.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import trio

from swarmnode.config import Config, DispatchConfig
from swarmnode.services.remote_experts import WireForm
from swarmnode.testing.swarm import open_swarm
from swarmnode.weights.catalog import bundled_model
from swarmnode.wire.constants import ENCODINGS

FORMS = tuple(WireForm(form, encoding) for form in ("experts", "partial") for encoding in ENCODINGS)
TEXTS = (
    "To Sherlock Holmes she is always the woman. I have seldom heard him mention her under any other",
    "To Sherlock Holmes she is always the woman. I have seldom heard him mention her under any other name. "
    "In his eyes she eclipses and predominates the whole of her sex.",
    "It was a cold morning in the early spring, and we sat after breakfast on either side of the fire.",
    "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\nI am a very small mixture of experts",
    "I had called upon my friend, Mr. Sherlock Holmes, one day in the autumn of last year and found him in "
    "deep conversation",
)
BUDGET_BYTES = 3_000_000
PATIENT = Config(dispatch=DispatchConfig(deadline_s=30.0, probe_timeout_s=30.0))
"""No row may be computed locally because the machine is busy: what is measured does not depend on time."""


async def measure() -> None:
    print(f"{'form':<16}{'tokens':>7}{'cosine':>11}{'worst':>9}{'max|d|':>9}{'same argmax':>13}")
    with tempfile.TemporaryDirectory() as folder:
        async with open_swarm(bundled_model(), Path(folder)) as swarm:
            encode = swarm.backbone.engine.tokenizer.encode
            tokens = [encode(text, parse_special=True) for text in TEXTS]
            alone = [(await swarm.logits(ids))[0] for ids in tokens]
    for form in FORMS:
        with tempfile.TemporaryDirectory() as folder:
            # Workers come first: with demand known, they hold much wanted experts twice and others not at all.
            async with open_swarm(bundled_model(), Path(folder), form=form, config=PATIENT) as swarm:
                for _ in range(3):
                    await swarm.join(BUDGET_BYTES)
                for ids, expected in zip(tokens, alone, strict=True):
                    helped, account = await swarm.logits(ids)
                    assert account.remote == account.pairs, "not every row was remote"
                    print(row(f"{form.form} {form.encoding}", expected, helped))


def row(name: str, expected: npt.NDArray[np.float32], helped: npt.NDArray[np.float32]) -> str:
    """One line of the table; both f32 [T, n_vocab]."""
    a, b = expected.astype(np.float64), helped.astype(np.float64)
    each = np.sum(a * b, 1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    total = np.sum(a * b) / (np.linalg.norm(a) * np.linalg.norm(b))
    same = np.mean(a.argmax(1) == b.argmax(1))
    return f"{name:<16}{len(a):>7}{total:>11.6f}{each.min():>9.5f}{np.abs(a - b).max():>9.3f}{same:>13.0%}"


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    trio.run(measure)


if __name__ == "__main__":
    main()
