"""An MTP block in float64 numpy, from the formula in blocks/nextn.py: the judge of its graphs.

All cells of a sequence are computed anew for each guess; nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .oracle_forward import Array, ForwardOracle


class MtpOracle(ForwardOracle):
    """`guess_all(text, token, n)`: n guesses behind a token that comes behind a text.

    Attributes that tests change to plant a fault: `hidden_first` (the order of the two halves), `before_norm` (which
    hidden state), beside ForwardOracle's.
    """

    hidden_first = False
    before_norm = False

    def hidden_states(self, text: Sequence[int]) -> Array:
        """What the model's head is given for each token, f64 [T, n_embd]."""
        self.run(text)
        last = self._index.n_layer - 1
        hidden: Array = self.named["l_out", last] if self.before_norm else self.named["result_norm", -1]
        return hidden

    def guess_all(self, text: Sequence[int], token: int, n: int) -> tuple[list[int], list[Array]]:
        """The guesses, and the logits that each was made from."""
        hidden = self.hidden_states(text)
        tokens = [*text[1:], token]
        guesses, logits = [], []
        for _ in range(n):
            outputs = self.outputs(tokens, hidden)
            logits.append(self.logits_of(outputs[-1]))
            guesses.append(int(np.argmax(logits[-1])))
            tokens.append(guesses[-1])
            hidden = np.concatenate([hidden, outputs[-1:]])
        return guesses, logits

    def outputs(self, tokens: Sequence[int], hidden: Array) -> Array:
        """The block's hidden states, f64 [T, n_embd], for the tokens that come behind each of the hidden states."""
        layer = self._index.n_layer
        block = f"blk.{layer}."
        table = block + "nextn.embed_tokens.weight"
        embeddings = self._weight(table if table in self._index.tensors else "token_embd.weight")[
            list(tokens)
        ]
        halves = [
            self._norm(embeddings, block + "nextn.enorm.weight"),
            self._norm(hidden, block + "nextn.hnorm.weight"),
        ]
        joined = np.concatenate(halves[::-1] if self.hidden_first else halves, axis=1)
        x = self._linear(layer, "nextn.eh_proj", joined)
        residual = self._attention(layer, self._norm(x, block + "attn_norm.weight")) + x
        rows = self._norm(residual, block + "post_attention_norm.weight")
        x = (
            self._routed(layer, rows) * self.moe_factor
            + self._shared(layer, rows) * self.shared_factor
            + residual
        )
        norm = block + "nextn.shared_head_norm.weight"
        return self._norm(x, norm if norm in self._index.tensors else "output_norm.weight")

    def logits_of(self, hidden: Array) -> Array:
        """Logits f64 [n_vocab]."""
        names = (
            f"blk.{self._index.n_layer}.nextn.shared_head_head.weight",
            "output.weight",
            "token_embd.weight",
        )
        name = next(name for name in names if name in self._index.tensors)
        result: Array = hidden @ self._weight(name).T
        return result
