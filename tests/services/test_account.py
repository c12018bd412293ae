"""The account of several answers together."""

from __future__ import annotations

from swarmnode.services.account import Account, WorkerShare


def test_of_each_prompt_what_was_cached_counts_once() -> None:
    """As its tokens do: two prompts of which 10 and 4 tokens were held, with two answers each."""
    accounts = [
        Account(pairs=8, cached_tokens=10, workers={"a": WorkerShare(pairs=2)}),
        Account(pairs=8, cached_tokens=3),
        Account(pairs=8, cached_tokens=0),
        Account(pairs=8, cached_tokens=4, workers={"a": WorkerShare(pairs=1)}),
    ]
    total = Account.total(accounts, 2)
    assert (total.cached_tokens, total.pairs, total.worker("a").pairs) == (14, 32, 3)
    assert Account.total(accounts, 4).cached_tokens == 10
    assert Account.total(accounts, 1).cached_tokens == 17
