"""When a consumer has refused too much to go on."""

from __future__ import annotations

from headrace_runtime.settings.sections import RefusalBounds
from headrace_runtime.stream.pausing import RefusalLimit


def test_a_run_of_refusals_is_cut_at_its_bound() -> None:
    limit = RefusalLimit(RefusalBounds(run_max=3))
    assert limit.admits([True] * 5) == 3
    limit.note([True] * 3)
    assert limit.admits([True]) == 0
    assert limit.admits([False, True, True]) == 3, "a good record ends the run"


def test_a_share_is_looked_at_once_there_were_enough() -> None:
    limit = RefusalLimit(RefusalBounds(run_max=0, share_max=0.5, window=10))
    limit.note([True, False] * 4)
    assert limit.reason is None
    assert limit.admits([True, True, True]) == 1, "the tenth would make six of ten"


def test_after_a_reset_it_counts_anew() -> None:
    limit = RefusalLimit(RefusalBounds(run_max=1))
    limit.note([True, True])
    assert limit.reason is not None
    limit.reset()
    assert limit.admits([True]) == 1
