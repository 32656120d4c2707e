"""Experiences of rows: valid for the trainer, reproducible, and unique."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from headrace_operations.jobs.checking import CheckedRow
from headrace_operations.jobs.written_experiences import experiences, row_order
from headrace_schemas import Experience
from headrace_schemas.programs.models import WrittenBranch, WrittenSpan

TIME = datetime(2026, 1, 1, tzinfo=UTC)
VERSION = "m@0123456789abcdef"
SHORT_BRANCH = WrittenBranch(token_ids=(5, 6, 7, 8), spans=(WrittenSpan(start=2, length=2, message=1),))
LONG_BRANCH = WrittenBranch(
    token_ids=(5, 6, 7, 8, 9, 4),
    spans=(WrittenSpan(start=1, length=2, message=1), WrittenSpan(start=4, length=2, message=3)),
)
LATER_BRANCH = WrittenBranch(token_ids=(5, 6, 7, 8), spans=(WrittenSpan(start=2, length=2, message=5),))


def row(*answers: tuple[WrittenBranch, ...], number: int = 3, **fields: Any) -> CheckedRow:
    return CheckedRow(file="a" * 64, row=number, prompt="b" * 64, answers=answers, **fields)


def build_experiences(checked_row: CheckedRow, epoch: int = 0) -> list[Experience]:
    return list(experiences(checked_row, epoch, model="m", version=VERSION, time=TIME))


def test_an_answer_becomes_a_written_experience() -> None:
    (experience,) = build_experiences(row((LONG_BRANCH,)))
    assert (experience.origin, experience.reward, experience.no_reward) == ("written", None, "no_reward")
    assert (experience.weight, experience.preferences) == (1.0, ())
    assert experience.branch is not None
    assert experience.branch.loss_mask == (0, 1, 1, 0, 1, 1)
    assert {span.version for span in experience.branch.spans} == {VERSION}
    assert all(set(span.logprobs) == {0.0} for span in experience.branch.spans)
    assert len(set(experience.turn_ids)) == 2
    assert Experience.from_json(experience.to_json()) == experience


def test_a_row_without_reward_and_label_has_no_reward() -> None:
    assert build_experiences(row((SHORT_BRANCH,), reward=-0.5))[0].reward == -0.5
    assert [build_experiences(row((SHORT_BRANCH,), label=label))[0].reward for label in (True, False)] == [1.0, 0.0]
    for experience in build_experiences(row((SHORT_BRANCH,), (LONG_BRANCH,))):
        assert (experience.reward, experience.no_reward) == (None, "no_reward"), (
            "an answer of a preference has no reward"
        )


def test_the_answers_of_a_preference_share_its_id() -> None:
    chosen, rejected = build_experiences(
        row((SHORT_BRANCH,), (SHORT_BRANCH.model_copy(update={"token_ids": (5, 6, 7, 9)}),))
    )
    (chosen_side,), (rejected_side,) = chosen.preferences, rejected.preferences
    assert (chosen_side.side, rejected_side.side) == ("chosen", "rejected")
    assert chosen_side.preference_id == rejected_side.preference_id
    assert (chosen_side.turn_id, rejected_side.turn_id) == (chosen.turn_ids[0], rejected.turn_ids[0])
    assert chosen.experience_id != rejected.experience_id


def test_the_branches_of_an_answer_share_its_weight() -> None:
    branches = build_experiences(row((SHORT_BRANCH, LONG_BRANCH)))
    assert [experience.weight for experience in branches] == [0.5, 0.5]
    assert [experience.branch_index for experience in branches] == [0, 1]
    assert len({experience.trajectory_id for experience in branches}) == 1


def test_ids_are_reproducible_and_unique() -> None:
    rows = [
        row((SHORT_BRANCH,)),
        row((SHORT_BRANCH,), number=4),
        row((SHORT_BRANCH,), (LONG_BRANCH,), number=5),
        row((SHORT_BRANCH, LATER_BRANCH), number=6),
    ]
    all_experiences = [
        experience for epoch in range(3) for checked_row in rows for experience in build_experiences(checked_row, epoch)
    ]
    assert [
        experience.to_json()
        for epoch in range(3)
        for checked_row in rows
        for experience in build_experiences(checked_row, epoch)
    ] == [experience.to_json() for experience in all_experiences]
    assert len({experience.experience_id for experience in all_experiences}) == len(all_experiences)
    assert len({turn for experience in all_experiences for turn in experience.turn_ids}) == sum(
        len(experience.turn_ids) for experience in all_experiences
    )
    other_file = build_experiences(row((SHORT_BRANCH,)).model_copy(update={"file": "c" * 64}))
    assert other_file[0].experience_id not in {experience.experience_id for experience in all_experiences}, (
        "the digest of the file is part of the ids"
    )


def test_each_epoch_has_a_reproducible_order() -> None:
    assert row_order(50, 0, 7, shuffle=False) == list(range(50))
    orders = [row_order(50, epoch, 7, shuffle=True) for epoch in range(3)]
    assert [sorted(order) for order in orders] == [list(range(50))] * 3
    assert len({tuple(order) for order in orders}) == 3
    assert orders == [row_order(50, epoch, 7, shuffle=True) for epoch in range(3)]
    assert row_order(50, 0, 8, shuffle=True) != orders[0]
