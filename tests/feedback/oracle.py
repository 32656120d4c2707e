"""Expected experiences: plain dictionaries that apply every feedback in order.

No code of the services is used. A later value replaces an earlier one; the sums are made at the end.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

from tests.feedback.sayings import LABELS, Answer, Saying, Scene

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
