"""Corrupted signals for control runs: the same feedback, attached to other answers. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from random import Random

from headrace_schemas import Branch, Experience
from headrace_schemas.events.experience import Edit, PreferenceSide, TurnReward


def shuffle_edits(experiences: Sequence[Experience], chance: Random) -> list[Experience]:
    """Give each edit the text of another run's edit."""
    messages = [edit.message for experience in experiences for edit in experience.edits]
    dealt = iter(chance.sample(messages, len(messages)))

    def corrupt(edit: Edit) -> Edit:
        return edit.model_copy(update={"message": next(dealt)})

    return [
        experience.model_copy(update={"edits": tuple(map(corrupt, experience.edits))}) for experience in experiences
    ]


def shuffle_preference_sides(experiences: Sequence[Experience], chance: Random) -> list[Experience]:
    """Assign the preferred side of each comparison at random."""
    names = sorted({side.preference_id for experience in experiences for side in experience.preferences})
    turned = {name for name in names if chance.random() < 0.5}
    other = {"chosen": "rejected", "rejected": "chosen"}

    def corrupt(side: PreferenceSide) -> PreferenceSide:
        return side.model_copy(update={"side": other[side.side]}) if side.preference_id in turned else side

    return [
        experience.model_copy(update={"preferences": tuple(map(corrupt, experience.preferences))})
        for experience in experiences
    ]


def shuffle_turn_rewards(experiences: Sequence[Experience], chance: Random) -> list[Experience]:
    """Shuffle the rewards of turns and leave the rewards of runs unchanged."""
    values = [turn.value for experience in experiences for turn in experience.turn_rewards]
    dealt = iter(chance.sample(values, len(values)))

    def corrupt(turn: TurnReward) -> TurnReward:
        return turn.model_copy(update={"value": next(dealt)})

    return [
        experience.model_copy(update={"turn_rewards": tuple(map(corrupt, experience.turn_rewards))})
        for experience in experiences
    ]


def shuffle_replies(experiences: Sequence[Experience], answered: Collection[str], chance: Random) -> list[Experience]:
    """Replace the user's reply between an answer and the next one by the reply of another run.

    The model's next answer stays.

    Args:
        answered: turns that a user replied to.
    """
    indices = [_answered_span(experience.branch, answered) for experience in experiences]
    replies = [
        experience.branch.token_ids[experience.branch.spans[index].stop : experience.branch.spans[index + 1].start]
        for experience, index in zip(experiences, indices, strict=True)
        if experience.branch is not None and index is not None
    ]
    dealt = iter(chance.sample(replies, len(replies)))
    return [
        experience if experience.branch is None or index is None else experience.model_copy(
            update={"branch": _with_reply(experience.branch, index, next(dealt))}
        )
        for experience, index in zip(experiences, indices, strict=True)
    ]  # fmt: skip


def _answered_span(branch: Branch | None, answered: Collection[str]) -> int | None:
    """Return the index of the span that a user replied to and after which the model continued, or None."""
    spans = () if branch is None else branch.spans
    return next((index for index, (span, _) in enumerate(pairwise(spans)) if span.turn_id in answered), None)


def _with_reply(branch: Branch, index: int, reply: Sequence[int]) -> Branch:
    """Return the branch with another reply after the span `index`."""
    before, after = branch.spans[index].stop, branch.spans[index + 1].start
    longer = len(reply) - (after - before)
    spans = [
        span if number <= index else span.model_copy(update={"start": span.start + longer})
        for number, span in enumerate(branch.spans)
    ]
    ids = (*branch.token_ids[:before], *reply, *branch.token_ids[after:])
    return branch.model_copy(update={"token_ids": ids, "spans": tuple(spans)})
