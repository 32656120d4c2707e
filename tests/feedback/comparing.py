"""The experiences of the services against those of the oracle, by value."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from headrace_schemas import Experience, Message
from tests.feedback.oracle import Oracle, Wanted
from tests.feedback.sayings import Answer, Saying, Scene
from tests.feedback.world import branches, trajectory

WEIGHTS: Mapping[str, float] = {"user:*": 0.5, "crowd": 2.0, "crowd:truth": 0.0, "*": 1.0}


def weight(source: str) -> float:
    """`WEIGHTS` in other words."""
    if source.startswith("user:"):
        return 0.5
    return {"crowd": 2.0, "crowd:truth": 0.0}.get(source, 1.0)


def differences(
    sayings: Sequence[Saying], told: Sequence[Scene], newest: Mapping[str, Experience], oracle: Oracle
) -> list[str]:
    """A sentence for each experience, and each preference, that is not as it should be."""
    for one in sorted(sayings, key=lambda one: one.place):
        oracle.hear(one)
    compared = {answer for _, _, *pair in oracle.preferences() for answer in pair}
    found = [problem for scene in told for problem in _of_scene(scene, newest, oracle, compared)]
    made = _preferences(newest.values())
    wanted = [repr((source, chosen, rejected)) for source, _, chosen, rejected in oracle.preferences()]
    found += [f"preference {text} is missing" for text in _beyond(wanted, made)]
    return found + [f"preference {text} stands and should not" for text in _beyond(made, wanted)]


def _of_scene(
    scene: Scene, newest: Mapping[str, Experience], oracle: Oracle, compared: Collection[Answer]
) -> Iterator[str]:
    closed = trajectory(scene)
    for index, answers in enumerate(branches(scene)):
        name = f"{scene.session_id}, branch {index}"
        made = newest.get(Experience.id_of(closed.trajectory_id, index))
        wanted = oracle.wanted(scene, answers)
        if made is None:
            yield f"{name} has no experience"
            continue
        compares = any(answer in compared for answer in answers)
        yield from (f"{name}: {problem}" for problem in _against(made, wanted, compares=compares))
        if made.branch is not None and made.branch != closed.branches[index]:
            yield f"{name}: other tokens"


def _against(made: Experience, wanted: Wanted, *, compares: bool) -> Iterator[str]:
    if not _equal(made.reward, wanted.reward):
        yield f"reward {made.reward}, not {wanted.reward}"
    single = {one.turn_id: one.value for one in made.turn_rewards}
    if single.keys() != wanted.turn_rewards.keys() or any(
        not _equal(single[turn], value) for turn, value in wanted.turn_rewards.items()
    ):
        yield f"turn rewards {single}, not {wanted.turn_rewards}"
    edits = sorted(((one.turn_id, one.choice), one.source, _text(one.message)) for one in made.edits)
    if edits != list(wanted.edits):
        yield f"edits {edits}, not {wanted.edits}"
    needed = wanted.reward is not None or bool(wanted.edits) or compares
    if needed != (made.branch is not None):
        yield f"its branch is {'missing' if needed else 'there for nothing'}"


def _preferences(made: Iterable[Experience]) -> list[str]:
    sides: dict[str, dict[str, tuple[str, tuple[str, int]]]] = {}
    for one in made:
        for side in one.preferences:
            sides.setdefault(side.preference_id, {})[side.side] = side.source, (side.turn_id, side.choice)
    return sorted(
        repr((both["chosen"][0], both["chosen"][1], both["rejected"][1])) if len(both) == 2 else f"half of one: {both}"
        for both in sides.values()
    )


def _beyond(some: Sequence[str], others: Sequence[str]) -> list[str]:
    return sorted((Counter(some) - Counter(others)).elements())


def _text(message: Message) -> str:
    if message.tool_calls:
        called = message.tool_calls[0].function
        return json.dumps({"name": called.name, "arguments": called.arguments})
    return message.text


def _equal(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return math.isclose(one, other, abs_tol=1e-9)
