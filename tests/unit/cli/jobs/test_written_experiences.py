"""The experiences of a row: valid for the trainer, the same whenever they are made, and never the same twice."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from headrace_operations.jobs.checking import CheckedRow
from headrace_operations.jobs.written_experiences import experiences, row_order
from headrace_schemas import Experience
from headrace_schemas.written import WrittenBranch, WrittenSpan

TIME = datetime(2026, 1, 1, tzinfo=UTC)
VERSION = "m@0123456789abcdef"
ONE = WrittenBranch(token_ids=(5, 6, 7, 8), spans=(WrittenSpan(start=2, length=2, message=1),))
TWO = WrittenBranch(
    token_ids=(5, 6, 7, 8, 9, 4),
    spans=(WrittenSpan(start=1, length=2, message=1), WrittenSpan(start=4, length=2, message=3)),
)
LATER = WrittenBranch(token_ids=(5, 6, 7, 8), spans=(WrittenSpan(start=2, length=2, message=5),))


def row(*answers: tuple[WrittenBranch, ...], number: int = 3, **said: Any) -> CheckedRow:
    return CheckedRow(file="a" * 64, row=number, prompt="b" * 64, answers=answers, **said)


def made(one: CheckedRow, epoch: int = 0) -> list[Experience]:
    return list(experiences(one, epoch, model="m", version=VERSION, time=TIME))


def test_an_answer_is_an_experience_that_somebody_wrote() -> None:
    (found,) = made(row((TWO,)))
    assert (found.origin, found.reward, found.no_reward) == ("written", None, "no_reward")
    assert (found.weight, found.preferences) == (1.0, ())
    assert found.branch is not None
    assert found.branch.loss_mask == (0, 1, 1, 0, 1, 1)
    assert {span.version for span in found.branch.spans} == {VERSION}
    assert all(set(span.logprobs) == {0.0} for span in found.branch.spans)
    assert len(set(found.turn_ids)) == 2
    assert Experience.from_json(found.to_json()) == found


def test_what_a_row_says_is_its_reward_and_nothing_becomes_a_zero() -> None:
    assert made(row((ONE,), reward=-0.5))[0].reward == -0.5
    assert [made(row((ONE,), label=label))[0].reward for label in (True, False)] == [1.0, 0.0]
    for one in made(row((ONE,), (TWO,))):
        assert (one.reward, one.no_reward) == (None, "no_reward"), "a side of a pair has no reward of its own"


def test_the_sides_of_a_pair_meet() -> None:
    chosen, rejected = made(row((ONE,), (ONE.model_copy(update={"token_ids": (5, 6, 7, 9)}),)))
    (mine,), (theirs,) = chosen.preferences, rejected.preferences
    assert (mine.side, theirs.side) == ("chosen", "rejected")
    assert mine.preference_id == theirs.preference_id
    assert (mine.turn_id, theirs.turn_id) == (chosen.turn_ids[0], rejected.turn_ids[0])
    assert chosen.experience_id != rejected.experience_id


def test_the_branches_of_an_answer_share_its_weight() -> None:
    found = made(row((ONE, TWO)))
    assert [one.weight for one in found] == [0.5, 0.5]
    assert [one.branch_index for one in found] == [0, 1]
    assert len({one.trajectory_id for one in found}) == 1


def test_the_same_row_makes_the_same_bytes_and_no_two_rows_do() -> None:
    rows = [row((ONE,)), row((ONE,), number=4), row((ONE,), (TWO,), number=5), row((ONE, LATER), number=6)]
    every = [one for epoch in range(3) for each in rows for one in made(each, epoch)]
    assert [one.to_json() for epoch in range(3) for each in rows for one in made(each, epoch)] == [
        one.to_json() for one in every
    ]
    assert len({one.experience_id for one in every}) == len(every)
    assert len({turn for one in every for turn in one.turn_ids}) == sum(len(one.turn_ids) for one in every)
    other = made(row((ONE,)).model_copy(update={"file": "c" * 64}))
    assert other[0].experience_id not in {one.experience_id for one in every}, "of another file"


def test_each_epoch_has_an_order_of_its_own_that_follows_from_the_seed() -> None:
    assert row_order(50, 0, 7, shuffle=False) == list(range(50))
    found = [row_order(50, epoch, 7, shuffle=True) for epoch in range(3)]
    assert [sorted(one) for one in found] == [list(range(50))] * 3
    assert len({tuple(one) for one in found}) == 3
    assert found == [row_order(50, epoch, 7, shuffle=True) for epoch in range(3)]
    assert row_order(50, 0, 8, shuffle=True) != found[0]
