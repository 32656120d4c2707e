"""The experiences of the services against those of the oracle, by value."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from headrace_schemas import Experience, Message
from tests.feedback.oracle import ExpectedExperience, Oracle
from tests.feedback.sayings import Answer, Saying, Scene
from tests.feedback.world import branches, trajectory

WEIGHTS: Mapping[str, float] = {"user:*": 0.5, "crowd": 2.0, "crowd:truth": 0.0, "*": 1.0}


def weight(source: str) -> float:
    """`WEIGHTS` in other words."""
    if source.startswith("user:"):
        return 0.5
    return {"crowd": 2.0, "crowd:truth": 0.0}.get(source, 1.0)


def differences(
    sayings: Sequence[Saying], scenes: Sequence[Scene], newest: Mapping[str, Experience], oracle: Oracle
) -> list[str]:
    """A sentence for each experience, and each preference, that is not as it should be."""
    for saying in sorted(sayings, key=lambda saying: saying.number):
        oracle.apply_saying(saying)
    compared = {answer for _, _, *pair in oracle.preferences() for answer in pair}
    problems = [problem for scene in scenes for problem in _of_scene(scene, newest, oracle, compared)]
    preferences = _preferences(newest.values())
    expected = [repr((source, chosen, rejected)) for source, _, chosen, rejected in oracle.preferences()]
    problems += [f"preference {text} is missing" for text in _beyond(expected, preferences)]
    return problems + [f"preference {text} stands and should not" for text in _beyond(preferences, expected)]


def _of_scene(
    scene: Scene, newest: Mapping[str, Experience], oracle: Oracle, compared: Collection[Answer]
) -> Iterator[str]:
    closed = trajectory(scene)
    for index, answers in enumerate(branches(scene)):
        name = f"{scene.session_id}, branch {index}"
        experience = newest.get(Experience.id_of(closed.trajectory_id, index))
        expected = oracle.expected_of(scene, answers)
        if experience is None:
            yield f"{name} has no experience"
            continue
        compares = any(answer in compared for answer in answers)
        yield from (f"{name}: {problem}" for problem in _against(experience, expected, compares=compares))
        if experience.branch is not None and experience.branch != closed.branches[index]:
            yield f"{name}: other tokens"


def _against(experience: Experience, expected: ExpectedExperience, *, compares: bool) -> Iterator[str]:
    if not _equal(experience.reward, expected.reward):
        yield f"reward {experience.reward}, not {expected.reward}"
    single = {item.turn_id: item.value for item in experience.turn_rewards}
    if single.keys() != expected.turn_rewards.keys() or any(
        not _equal(single[turn], value) for turn, value in expected.turn_rewards.items()
    ):
        yield f"turn rewards {single}, not {expected.turn_rewards}"
    edits = sorted(((item.turn_id, item.choice), item.source, _text(item.message)) for item in experience.edits)
    if edits != list(expected.edits):
        yield f"edits {edits}, not {expected.edits}"
    needed = expected.reward is not None or bool(expected.edits) or compares
    if needed != (experience.branch is not None):
        yield f"its branch is {'missing' if needed else 'there for nothing'}"


def _preferences(experiences: Iterable[Experience]) -> list[str]:
    sides: dict[str, dict[str, tuple[str, tuple[str, int]]]] = {}
    for experience in experiences:
        for side in experience.preferences:
            sides.setdefault(side.preference_id, {})[side.side] = side.source, (side.turn_id, side.choice)
    return sorted(
        repr((both["chosen"][0], both["chosen"][1], both["rejected"][1])) if len(both) == 2 else f"half of one: {both}"
        for both in sides.values()
    )


def _beyond(some: Sequence[str], counted: Sequence[str]) -> list[str]:
    return sorted((Counter(some) - Counter(counted)).elements())


def _text(message: Message) -> str:
    if message.tool_calls:
        called = message.tool_calls[0].function
        return json.dumps({"name": called.name, "arguments": called.arguments})
    return message.text


def _equal(left: float | None, right: float | None) -> bool:
    if left is None or right is None:
        return left is right
    return math.isclose(left, right, abs_tol=1e-9)
