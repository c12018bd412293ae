"""Comparing all records: what news did not bring."""

from __future__ import annotations

from dataclasses import replace

from .cores import connect, core_of, run
from .samples import CONFIG, contents, key_of, record_of


def test_two_different_tables_become_one() -> None:
    a, b = core_of(1), core_of(2)
    for number in range(10, 500):
        core = (a, b)[number % 2]
        core.table.offer(record_of(number), 0.0, key_of(3).node_id)
    for number in range(500, 510):
        for core in (a, b):
            core.table.offer(record_of(number), 0.0, key_of(3).node_id)
    connect(a, b)
    run([a, b], 0.0, 6.0)
    assert len(a.table) == len(b.table) == 500
    assert contents(a.table) == contents(b.table)


def test_a_newcomer_gets_more_than_one_comparison_holds() -> None:
    config = replace(CONFIG, max_pending=50)
    old, new = core_of(1, config), core_of(2, config)
    for number in range(10, 2500):
        old.table.offer(record_of(number), 0.0, key_of(3).node_id)
    connect(old, new)
    run([old, new], 0.0, 20.0)
    assert len(new.table) == 2490
