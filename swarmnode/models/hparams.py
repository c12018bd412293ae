"""Hyperparameters of a model, read from GGUF metadata and checked before ggml sees any of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from swarmnode.counts import counted
from swarmnode.models.metadata import Metadata, shown
from swarmnode.weights.index import ModelIndex

MAX_HEADS = 1 << 16
MAX_HEAD_SIZE = 1 << 14
MAX_STATE_SIZE = 1 << 10
"""Of a recurrent head, whose state is a matrix of this width; 128 in the real models."""
MAX_CONTEXT = 1 << 24
MAX_CHANNELS = 1 << 20
"""All heads of a token together: 32,768 in the largest real models. ggml's ssm_conv counts channels times tokens
in an int."""

NeutralValue: TypeAlias = bool | int | float | str
_KINDS: Mapping[type, str] = {bool: "a bool", int: "an integer", float: "a float", str: "a string"}


@dataclass(frozen=True)
class Hparams:
    """Sizes of a model, in llama.cpp's words; the GGUF key of each (without the architecture) in quotes.

    Fields of parts that an architecture lacks (recurrent layers, shared expert) are 0.
    """

    n_layer: int
    """'block_count' less 'nextn_predict_layers'."""
    n_mtp: int
    """'nextn_predict_layers', the MTP blocks behind the last layer; 0 if they are not used."""
    n_embd: int
    """'embedding_length'"""
    n_vocab: int
    """Rows of token_embd.weight."""
    n_ctx_train: int
    """'context_length'"""
    norm_rms_eps: float
    """'attention.layer_norm_rms_epsilon'"""
    n_head: int
    """'attention.head_count'"""
    n_head_kv: int
    """'attention.head_count_kv'"""
    n_embd_head: int
    """'attention.key_length' = 'attention.value_length'"""
    attention_scale: float
    """'attention.scale', else 1 / sqrt(n_embd_head)"""
    n_rot: int
    """'rope.dimension_count': the values of a head that are rotated"""
    rope_sections: tuple[int, int, int, int]
    """'rope.dimension_sections'"""
    rope_freq_base: float
    """'rope.freq_base'"""
    n_expert: int
    """'expert_count'"""
    n_expert_used: int
    """'expert_used_count'"""
    n_ff_shexp: int
    """'expert_shared_feed_forward_length'"""
    ssm_d_conv: int
    """'ssm.conv_kernel'"""
    ssm_d_state: int
    """'ssm.state_size': width of a K head and of a V head"""
    ssm_n_group: int
    """'ssm.group_count': K heads"""
    ssm_dt_rank: int
    """'ssm.time_step_rank': V heads"""
    recurrent: tuple[bool, ...]
    """For each layer and MTP block: linear attention (True) or full attention; 'attention.recurrent_layers', else from
    'full_attention_interval'"""

    @property
    def n_embd_kv(self) -> int:
        """Values of K (and of V) for one token and full-attention layer."""
        return self.n_head_kv * self.n_embd_head

    @property
    def ssm_d_inner(self) -> int:
        """Values of V for one token and recurrent layer ('ssm.inner_size')."""
        return self.ssm_dt_rank * self.ssm_d_state

    @property
    def ssm_n_channels(self) -> int:
        """Channels of the causal convolution: q, k and v side by side."""
        return self.ssm_d_inner + 2 * self.ssm_n_group * self.ssm_d_state


class MetadataReader(Metadata):
    """The `{architecture}.*` keys of an index."""

    def __init__(self, index: ModelIndex) -> None:
        super().__init__(index.metadata, f"{index.architecture}.", str(index.paths[0]))
        self.index = index

    def head_count(self, name: str, layers: Sequence[int]) -> int:
        """A count of heads: one number, or one a layer that must agree over `layers`."""
        if not isinstance(self.get(name), (np.ndarray, Sequence)):
            return self.integer(name, 1, MAX_HEADS)
        counts = self.integers(name, 0, MAX_HEADS)
        n_needed = max(self.index.n_layer, *(layer + 1 for layer in layers), 0)
        if len(counts) < n_needed:
            self.fail(
                name, f"has {counted(len(counts), 'entry', 'entries')} for {counted(n_needed, 'layer')}"
            )
        used = {counts[layer] for layer in layers} or {max(counts)}
        if len(used) > 1:
            self.unsupported(name, f"differs between layers ({sorted(used)}); only equal layers are computed")
        if 0 in used:
            self.fail(name, "is 0 for a layer with full attention")
        return used.pop()

    def refuse_unless(self, neutral: Mapping[str, tuple[NeutralValue, ...]]) -> None:
        """UnsupportedModelError if a key is there with a value that would change the computation.

        ModelFileError for a value of another kind than the neutral ones.
        """
        for name, values in neutral.items():
            value = self.get(name)
            if value is None:
                continue
            if type(value) is not type(values[0]):
                self.fail(name, f"is {shown(value)}, not {_KINDS[type(values[0])]}")
            if value not in values:
                self.unsupported(name, f"= {shown(value)} is not computed by this version")
