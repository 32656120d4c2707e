"""What the experiences have to be in the end: plain dictionaries that hear every statement in order.

Nothing here is taken from the services. A later word overwrites an earlier one; in the end somebody adds up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tests.feedback.sayings import LABELS, Answer, Saying, Scene

GONE = "gone"
"""A word that was taken back."""
About = tuple[str, ...]
Preference = tuple[str, str | None, Answer, Answer]
"""Source with its metric, rater, the better answer and the other one."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What one experience has to say."""

    reward: float | None
    turn_rewards: Mapping[str, float]
    edits: Sequence[tuple[Answer, str, str]]
    """Sorted: the answer, the source, and the message as text."""


@dataclass
class Oracle:
    """`weight` says what a source counts; `combine` how sources become a reward."""

    weight: Any
    combine: Literal["mean", "sum"] = "mean"
    words: dict[About, dict[tuple[str, str | None], float | str | None]] = field(default_factory=dict)
    edits: dict[tuple[Answer, str, str | None], str] = field(default_factory=dict)
    compared: dict[tuple[frozenset[Answer], str, str | None], tuple[Answer, Answer]] = field(default_factory=dict)

    def hear(self, one: Saying) -> None:
        if one.form == "facts" and not one.withdrawn:
            return
        if one.form == "edit":
            self._edited(one)
        elif one.form == "preference":
            self._preferred(one)
        elif one.withdrawn:
            self._word(one, one.metric, GONE)
        elif one.form == "parts":
            for metric, value in one.said.items():
                self._word(one, metric, value)
        else:
            self._word(one, one.metric, self._value(one))

    @staticmethod
    def _value(one: Saying) -> float | None:
        if one.form == "label":
            return LABELS.get(one.said)
        if one.form == "rating":
            rating, (low, high) = one.said
            return float((rating - low) / (high - low))
        return float(one.said)

    def _word(self, one: Saying, metric: str | None, value: float | str | None) -> None:
        name = one.source if metric is None else f"{one.source}:{metric}"
        for about in self._about(one):
            self.words.setdefault(about, {})[name, one.rater] = value

    @staticmethod
    def _about(one: Saying) -> list[About]:
        if one.where == "task":
            return [("task", str(one.scene.task_id))]
        if one.where == "answer":
            ((turn, choice),) = one.answers
            return [("answer", turn, str(choice))]
        if one.where == "turns" or (one.where == "some turns" and set(one.turns) != set(one.scene.turns)):
            return [("turn", turn) for turn in one.turns]
        return [("session", one.scene.session_id)]

    def _edited(self, one: Saying) -> None:
        key = one.answers[0], one.source, one.rater
        self.edits.pop(key, None)
        if not one.withdrawn:
            self.edits[key] = (
                one.said if isinstance(one.said, str) else json.dumps(one.said["tool_calls"][0]["function"])
            )

    def _preferred(self, one: Saying) -> None:
        source = one.source if one.metric is None else f"{one.source}:{one.metric}"
        key = frozenset(one.answers), source, one.rater
        self.compared.pop(key, None)
        if not one.withdrawn:
            self.compared[key] = one.answers[0], one.answers[1]

    # In the end.

    def preferences(self) -> list[Preference]:
        """All that stand, sorted."""
        found = ((source, rater, *pair) for (_, source, rater), pair in self.compared.items())
        return sorted(found, key=repr)

    def wanted(self, scene: Scene, branch: Sequence[Answer]) -> Wanted:
        whole = dict(self.words.get(("task", str(scene.task_id)), {})) if scene.task_id else {}
        whole |= self.words.get(("session", scene.session_id), {})
        by_source = _means(whole)
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
        return Wanted(
            self._sum(by_source),
            {turn: value for turn, value in single.items() if value is not None},
            sorted(edits),
        )

    def _sum(self, means: Mapping[str, float]) -> float | None:
        told = [(value, self.weight(source)) for source, value in means.items() if self.weight(source)]
        if not told:
            return None
        total = math.fsum(value * weight for value, weight in told)
        return total if self.combine == "sum" else total / math.fsum(weight for _, weight in told)


def _means(words: Mapping[tuple[str, str | None], float | str | None]) -> dict[str, float]:
    """The mean of each source over the raters who have a value."""
    values: dict[str, list[float]] = {}
    for (source, _), value in words.items():
        if isinstance(value, float | int):
            values.setdefault(source, []).append(value)
    return {source: math.fsum(found) / len(found) for source, found in values.items()}
