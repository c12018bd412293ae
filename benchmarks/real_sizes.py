"""The sizes of the target, Qwen3.5-122B-A10B, for what can be measured without its file."""

from __future__ import annotations

from dataclasses import replace

from swarmnode.models.hparams import Hparams

REAL_LAYERS = 48


def with_real_states(hparams: Hparams) -> Hparams:
    """These, with the layers of the target, of which three in four are recurrent, and states of its sizes."""
    return replace(
        hparams,
        n_layer=REAL_LAYERS,
        recurrent=tuple((layer + 1) % 4 != 0 for layer in range(REAL_LAYERS)),
        ssm_d_conv=4,
        ssm_d_state=128,
        ssm_n_group=16,
        ssm_dt_rank=64,
    )
