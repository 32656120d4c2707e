"""What controls make of a signal: all that was said is said, but of something else. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from headrace_schemas import Experience
from headrace_schemas.events.experience import Edit, PreferenceSide, TurnReward


def edits_of_others(made: Sequence[Experience], chance: Random) -> list[Experience]:
    """Each edit replaces the answer that somebody else's was about."""
    messages = [edit.message for one in made for edit in one.edits]
    dealt = iter(chance.sample(messages, len(messages)))

    def spoiled(edit: Edit) -> Edit:
        return edit.model_copy(update={"message": next(dealt)})

    return [one.model_copy(update={"edits": tuple(map(spoiled, one.edits))}) for one in made]


def sides_by_lot(made: Sequence[Experience], chance: Random) -> list[Experience]:
    """A coin says of each comparison which answer is the better one."""
    names = sorted({side.preference_id for one in made for side in one.preferences})
    turned = {name for name in names if chance.random() < 0.5}
    other = {"chosen": "rejected", "rejected": "chosen"}

    def spoiled(side: PreferenceSide) -> PreferenceSide:
        return side.model_copy(update={"side": other[side.side]}) if side.preference_id in turned else side

    return [one.model_copy(update={"preferences": tuple(map(spoiled, one.preferences))}) for one in made]


def turns_by_lot(made: Sequence[Experience], chance: Random) -> list[Experience]:
    """The rewards of turns, dealt to other turns; those of runs stay."""
    values = [turn.value for one in made for turn in one.turn_rewards]
    dealt = iter(chance.sample(values, len(values)))

    def spoiled(turn: TurnReward) -> TurnReward:
        return turn.model_copy(update={"value": next(dealt)})

    return [one.model_copy(update={"turn_rewards": tuple(map(spoiled, one.turn_rewards))}) for one in made]
