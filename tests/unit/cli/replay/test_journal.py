"""Journal of a lineage: order, cuts and gaps."""

from __future__ import annotations

from typing import Any

from headrace_operations.replay.journal import ReadRange, build_journal
from headrace_schemas import BatchRecord, Read, TrainingMetrics, TrainingOutcome
from tests.support.account_events import START

DIGEST = "0" * 64
VERSION = "m@0123456789abcdef"


def reads(*pairs: tuple[int, int]) -> tuple[Read, ...]:
    return tuple(Read(partition=partition, until=until) for partition, until in pairs)


def account(number: int, *batches: BatchRecord, read: tuple[Read, ...] = (), **fields: Any) -> TrainingMetrics:
    defaults = {"time": START, "model": "m", "lineage": "main", "step": number, "account": number}
    return TrainingMetrics.model_validate({**defaults, "batches": batches, "read": read, **fields})


def batch(experiences: int, *pairs: tuple[int, int]) -> BatchRecord:
    return BatchRecord(step=1, experiences=experiences, digest=DIGEST, read=reads(*pairs))


def test_a_journal_has_ranges_and_cuts_in_order() -> None:
    first = account(1, batch(4, (0, 3), (1, 2)), batch(2, (0, 5)), read=reads((1, 4)))
    accounts = [account(0), account(2, batch(3, (1, 6), (0, 7))), first, first]
    journal = build_journal([*accounts, account(9, lineage="other"), account(1, model="n")], "m", "main")
    assert journal.gap is None
    assert journal.ranges == (
        ReadRange(0, 3),
        ReadRange(1, 2, (4,)),
        ReadRange(0, 5, (2,)),
        ReadRange(1, 4),
        ReadRange(1, 6),
        ReadRange(0, 7, (3,)),
    )
    assert [batch_record.experiences for batch_record in journal.batches] == [4, 2, 3]


def test_incomplete_journals_have_a_gap() -> None:
    complete = [account(0), account(1, batch(1, (0, 1)))]
    assert build_journal(complete, "m", "main").gap is None
    assert "has no report of model m in lineage else" in str(build_journal(complete, "m", "else").gap)
    assert "has not all reports of lineage main" in str(build_journal(complete[1:], "m", "main").gap)
    assert "has not all reports of lineage main" in str(build_journal([complete[0], account(2)], "m", "main").gap)
    old = account(2, verdicts=(TrainingOutcome(experience_id="e", revision=0, turn_ids=()),))
    assert "before batches were recorded" in str(build_journal([*complete, old], "m", "main").gap)
    assert "cut a batch before it read a record" in str(build_journal([account(0, batch(1))], "m", "main").gap)


def test_a_batch_cut_by_time_follows_earlier_reads() -> None:
    journal = build_journal([account(0), account(1, read=reads((0, 2), (1, 1))), account(2, batch(3))], "m", "main")
    assert journal.gap is None
    assert journal.ranges == (ReadRange(0, 2), ReadRange(1, 1, (3,)))


def test_two_batches_may_be_cut_after_the_same_record() -> None:
    journal = build_journal([account(0), account(1, batch(4, (0, 9)), batch(3)), account(2, batch(2))], "m", "main")
    assert journal.gap is None
    assert journal.ranges == (ReadRange(0, 9, (4, 3, 2)),)


def test_experiences_left_out_of_a_batch_count_in_its_cut() -> None:
    named = batch(2, (0, 9)).model_copy(update={"left_out": ("e1", "e4")})
    journal = build_journal(
        [account(0), account(1, named, batch(3), version=VERSION), account(2, batch(2))], "m", "main"
    )
    assert journal.ranges == (ReadRange(0, 9, (4, 3, 2), ("e1", "e4")),)
    assert [record.left_out for record in journal.recorded] == [("e1", "e4"), (), ()]


def test_recorded_batches_have_their_results() -> None:
    """A batch with a gradient that was not finite has the step of the batch before it; a version is of the last
    batch."""
    records = [batch(1, (0, 1)).model_copy(update={"step": step}) for step in (1, 2, 2, 3, 3)]
    accounts = [account(0, version=VERSION), account(1, *records[:2], version=VERSION), account(2, *records[2:4])]
    journal = build_journal([*accounts, account(3, records[4]), account(4, version=VERSION)], "m", "main")
    assert [record.trained for record in journal.recorded] == [True, True, False, True, False]
    assert [record.published for record in journal.recorded] == [False, True, False, False, True]
