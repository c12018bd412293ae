"""Answers that must have a form: a JSON schema or a grammar, kept to token by token by llguidance (an extra).

llguidance works on bytes, so it gets the vocabulary as it is, and every cut of a text in tokens that spells an allowed
text is allowed. Nothing is fetched: a schema that refers to another document is refused.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from swarmnode.errors import MissingExtraError, UsageError
from swarmnode.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

SCHEMA_OPTIONS = {"whitespace_pattern": r"\n?[ \t]{0,40}"}
"""Blanks between parts of JSON. Without a bound a small model may write them for ever. (In a Lark grammar a schema has
them as its `x-guidance`.)"""


class GrammarConstraint:
    """A place within a grammar: which tokens may come next. See models/sampling.Constraint."""

    def __init__(
        self,
        matcher: LLMatcher,
        n_vocab: int,
        end_id: int,
        end_ids: frozenset[int],
        thought_end: int | None = None,
    ) -> None:
        """`end_id` ends an answer that is whole, each of `end_ids` ends any. `thought_end`: the token behind which the
        grammar begins; before it all but ends may come. None: it begins at once.
        """
        self._matcher = matcher
        self._n_vocab = n_vocab
        self._end_id = end_id
        self._end_ids = end_ids | {end_id}
        self._thought_end = thought_end

    def copy(self) -> GrammarConstraint:
        """One for another answer, from the same place."""
        return GrammarConstraint(
            self._matcher.deep_copy(), self._n_vocab, self._end_id, self._end_ids, self._thought_end
        )

    @property
    def failure(self) -> str | None:
        """Why the answer had to end early: the grammar became too large to be followed."""
        return self._matcher.get_error() if self._matcher.is_error() else None

    def allowed(self) -> npt.NDArray[np.intp]:
        """Ids that may come next, rising; at least one. Never raises: other answers share the step."""
        if self._thought_end is not None:
            return np.delete(np.arange(self._n_vocab), sorted(self._end_ids))
        if not self._matcher.is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            ids = np.flatnonzero(np.unpackbits(bits, bitorder="little")[: self._n_vocab])
            if len(ids) and not self._matcher.is_error():
                return ids
        return np.array([self._end_id])

    def accept(self, token: int) -> None:
        """The answer goes on with this one."""
        if self._thought_end is not None:
            if token == self._thought_end:
                self._thought_end = None
        elif token != self._end_id and not self._matcher.is_error():
            self._matcher.consume_token(token)


class Grammars:
    """Makes constraints for one vocabulary. Blocks (the first for a second at 248,320 tokens); any thread may call."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._known: LLTokenizer | None = None

    def of_schema(self, schema: Mapping[str, Any], thought_end: int | None = None) -> GrammarConstraint:
        """JSON that is valid against a schema. UsageError if it is none, or uses what cannot be kept to."""
        return self._constraint(json_grammar(schema), thought_end)

    def of_lark(self, grammar: str, thought_end: int | None = None) -> GrammarConstraint:
        """A text of a grammar in llguidance's Lark form. UsageError as `of_schema`."""
        return self._constraint(_library().LLMatcher.grammar_from_lark(grammar), thought_end)

    def _constraint(self, grammar: str, thought_end: int | None) -> GrammarConstraint:
        tokenizer, matcher = self._tokenizer, _library().LLMatcher
        if tokenizer.eos_id is None:
            raise UsageError("this model names no end token, so answers of a given form cannot end")
        with self._lock:
            known = self._known = self._known or _library().LLTokenizer(_vocabulary(tokenizer))
        problem = matcher.validate_grammar(grammar, known)
        if problem:
            raise UsageError(f"the schema cannot be kept to: {problem}")
        return GrammarConstraint(
            matcher(known, grammar, log_level=0),
            tokenizer.n_vocab,
            tokenizer.eos_id,
            frozenset(tokenizer.end_ids),
            thought_end,
        )


def json_grammar(schema: Mapping[str, Any]) -> str:
    """llguidance's form of a schema."""
    options: Any = SCHEMA_OPTIONS
    try:
        return str(_library().LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))
    except ValueError as error:
        raise UsageError(f"the schema cannot be kept to: {error}") from None


def _library() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise MissingExtraError(
            "an answer of a given form (response_format, a tool that must be called)", "json"
        ) from None
    return llguidance


def _vocabulary(tokenizer: Tokenizer) -> Any:
    """As LLTokenizer takes it. Control tokens are told apart by a flag, so their spelling allows nothing."""
    import llguidance

    return llguidance.TokenizerWrapper(_Words(tokenizer))


class _Words:
    """What llguidance.TokenizerWrapper asks for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = tokenizer.eos_id
        self.bos_token_id = tokenizer.bos_id
        ids = range(tokenizer.n_vocab)
        self.tokens = [tokenizer.token_bytes(token, render_special=True) for token in ids]
        self.special_token_ids = [token for token in ids if tokenizer.is_control(token)]

    def __call__(self, text: bytes | str) -> Iterable[int]:
        """Token ids of a text."""
        spelt = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(spelt, add_bos=False)
