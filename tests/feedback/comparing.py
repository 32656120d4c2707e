"""The experiences of the services against those of the oracle, by value.

Expected experiences: plain dictionaries that apply every feedback in order.

No code of the services is used. A later value replaces an earlier one; the sums are made at the end.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from headrace_schemas import Experience, Message
from tests.feedback.world import LABELS, Answer, Saying, Scene, branches, trajectory

GONE = "gone"
"""A word that was taken back."""
About = tuple[str, ...]
Preference = tuple[str, str | None, Answer, Answer]
"""Source with its metric, rater, the better answer and the other one."""


@dataclass(frozen=True, slots=True)
class ExpectedExperience:
    """Expected content of one experience."""

    reward: float | None
    turn_rewards: Mapping[str, float]
    edits: Sequence[tuple[Answer, str, str]]
    """Sorted: the answer, the source, and the message as text."""


@dataclass
class Oracle:
    """`weight` returns the weight of a source; `combine` names the way from sources to a reward."""

    weight: Any
    combine: Literal["mean", "sum"] = "mean"
    words: dict[About, dict[tuple[str, str | None], float | str | None]] = field(default_factory=dict)
    edits: dict[tuple[Answer, str, str | None], str] = field(default_factory=dict)
    compared: dict[tuple[frozenset[Answer], str, str | None], tuple[Answer, Answer]] = field(default_factory=dict)

    def apply_saying(self, saying: Saying) -> None:
        if saying.form == "facts" and not saying.withdrawn:
            return
        if saying.form == "edit":
            self._edited(saying)
        elif saying.form == "preference":
            self._preferred(saying)
        elif saying.withdrawn:
            self._word(saying, saying.metric, GONE)
        elif saying.form == "parts":
            for metric, value in saying.content.items():
                self._word(saying, metric, value)
        else:
            self._word(saying, saying.metric, self._value(saying))

    @staticmethod
    def _value(saying: Saying) -> float | None:
        if saying.form == "label":
            return LABELS.get(saying.content)
        if saying.form == "rating":
            rating, (low, high) = saying.content
            return float((rating - low) / (high - low))
        return float(saying.content)

    def _word(self, saying: Saying, metric: str | None, value: float | str | None) -> None:
        name = saying.source if metric is None else f"{saying.source}:{metric}"
        for about in self._about(saying):
            self.words.setdefault(about, {})[name, saying.rater] = value

    @staticmethod
    def _about(saying: Saying) -> list[About]:
        if saying.where == "task":
            return [("task", str(saying.scene.task_id))]
        if saying.where == "answer":
            ((turn, choice),) = saying.answers
            return [("answer", turn, str(choice))]
        if saying.where == "turns" or (saying.where == "some turns" and set(saying.turns) != set(saying.scene.turns)):
            return [("turn", turn) for turn in saying.turns]
        return [("session", saying.scene.session_id)]

    def _edited(self, saying: Saying) -> None:
        key = saying.answers[0], saying.source, saying.rater
        self.edits.pop(key, None)
        if not saying.withdrawn:
            self.edits[key] = (
                saying.content
                if isinstance(saying.content, str)
                else json.dumps(saying.content["tool_calls"][0]["function"])
            )

    def _preferred(self, saying: Saying) -> None:
        source = saying.source if saying.metric is None else f"{saying.source}:{saying.metric}"
        key = frozenset(saying.answers), source, saying.rater
        self.compared.pop(key, None)
        if not saying.withdrawn:
            self.compared[key] = saying.answers[0], saying.answers[1]

    # In the end.

    def preferences(self) -> list[Preference]:
        """Return all valid preferences, sorted."""
        preferences = ((source, rater, *pair) for (_, source, rater), pair in self.compared.items())
        return sorted(preferences, key=repr)

    def expected_of(self, scene: Scene, branch: Sequence[Answer]) -> ExpectedExperience:
        session_values = dict(self.words.get(("task", str(scene.task_id)), {})) if scene.task_id else {}
        session_values |= self.words.get(("session", scene.session_id), {})
        by_source = _means(session_values)
        turn_means: dict[str, dict[str, float]] = {}
        for turn, choice in branch:
            of_turn = _means(self.words.get(("turn", turn), {}))
            of_turn |= _means(self.words.get(("answer", turn, str(choice)), {}))
            turn_means[turn] = of_turn
        for source in sorted({source for means in turn_means.values() for source in means} - by_source.keys()):
            values = [means[source] for means in turn_means.values() if source in means]
            by_source[source] = math.fsum(values) / len(values)
        single = {turn: self._sum(means) for turn, means in turn_means.items()}
        edits = [(answer, source, text) for (answer, source, _), text in self.edits.items() if answer in branch]
        return ExpectedExperience(
            self._sum(by_source),
            {turn: value for turn, value in single.items() if value is not None},
            sorted(edits),
        )

    def _sum(self, means: Mapping[str, float]) -> float | None:
        weighted = [(value, self.weight(source)) for source, value in means.items() if self.weight(source)]
        if not weighted:
            return None
        total = sum(Fraction(value) * Fraction(weight) for value, weight in weighted)
        return float(total if self.combine == "sum" else total / sum(Fraction(weight) for _, weight in weighted))


def _means(words: Mapping[tuple[str, str | None], float | str | None]) -> dict[str, float]:
    """Return the mean of each source over the raters with a value."""
    values: dict[str, list[float]] = {}
    for (source, _), value in words.items():
        if isinstance(value, float | int):
            values.setdefault(source, []).append(value)
    return {source: math.fsum(numbers) / len(numbers) for source, numbers in values.items()}


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
