"""What controls make of a signal: all that was said is said, but of something else. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from random import Random

from headrace_schemas import Branch, Experience
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


def replies_of_others(made: Sequence[Experience], answered: Collection[str], chance: Random) -> list[Experience]:
    """What stands between the answer of one of these turns and the next one is what stood there in another run; what
    the model said to it stays."""
    places = [_place(one.branch, answered) for one in made]
    between = [
        one.branch.token_ids[one.branch.spans[place].stop : one.branch.spans[place + 1].start]
        for one, place in zip(made, places, strict=True)
        if one.branch is not None and place is not None
    ]
    dealt = iter(chance.sample(between, len(between)))
    return [
        one if one.branch is None or place is None else one.model_copy(
            update={"branch": _spliced(one.branch, place, next(dealt))}
        )
        for one, place in zip(made, places, strict=True)
    ]  # fmt: skip


def _place(branch: Branch | None, answered: Collection[str]) -> int | None:
    """Of the span after which somebody replied and the model went on."""
    spans = () if branch is None else branch.spans
    return next((at for at, (one, _) in enumerate(pairwise(spans)) if one.turn_id in answered), None)


def _spliced(branch: Branch, place: int, reply: Sequence[int]) -> Branch:
    before, after = branch.spans[place].stop, branch.spans[place + 1].start
    longer = len(reply) - (after - before)
    spans = [
        span if at <= place else span.model_copy(update={"start": span.start + longer})
        for at, span in enumerate(branch.spans)
    ]
    ids = (*branch.token_ids[:before], *reply, *branch.token_ids[after:])
    return branch.model_copy(update={"token_ids": ids, "spans": tuple(spans)})
