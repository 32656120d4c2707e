"""Findings of a shadow, which are stored with its rollout, and expected metric values of the canary's sessions.

In the shadow both versions have answered prompts of the traffic. Their metric values are stored by kind of prompt: the
agent (its system prompt and tools), the task, and the opening. A session of the canary is expected to have the mean
value of its kind, shrunk towards the mean of the more general kind, as if that had been observed `STRENGTH` times
(Efron & Morris, "Stein's paradox in statistics", 1977). The kind is determined from the session's first prompt, which
exists before a version has answered.

`headrace_statistics.e_process` subtracts the expected value from the value of each unit. The tests stay valid if the
expectation is wrong: it then only costs more sessions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

from pydantic import Field

from headrace_registry.rollouts.estimate import ShadowEstimate
from headrace_schemas import Turn
from headrace_schemas.http.registry_api import ShadowState
from headrace_schemas.values.base import Finite, Model, Text

STRENGTH = 2.0
_ALL = ""
_KINDS_MAX = 4096
"""Maximum number of kinds with values of their own. For kinds that are seen later, the values of the more general kind
are used."""


def prompt_kinds(turn: Turn) -> tuple[str, ...]:
    """Return the kinds of prompt to which the first turn of a session belongs, from the most general to the most
    special."""
    users = next((index for index, item in enumerate(turn.messages) if item.role == "user"), len(turn.messages))
    agent = hashlib.sha256()
    for message in turn.messages[:users]:
        agent.update(message.model_dump_json(exclude_none=True).encode() + b"\n")
    for name in sorted(tool.function.name for tool in turn.tools):
        agent.update(name.encode() + b"\n")
    opening = agent.copy()
    for message in turn.messages[users : users + 1]:
        opening.update(message.model_dump_json(exclude_none=True).encode())
    kinds = [f"agent:{agent.hexdigest()[:16]}"]
    if turn.task_id:
        kinds.append(f"task:{hashlib.sha256(turn.task_id.encode()).hexdigest()[:16]}")
    return (*kinds, f"opening:{opening.hexdigest()[:16]}")


@dataclass(slots=True)
class Expectations:
    """Observed metric values by kind of prompt, from which the values of other sessions are predicted.

    `table` contains, for each metric and kind, the number of values and their sum.
    """

    table: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)

    def update(self, kinds: Sequence[str], values: Mapping[str, float]) -> None:
        """Add the metric values of a session whose prompt belongs to `kinds`, whichever version answered it."""
        for metric, value in values.items():
            by_kind = self.table.setdefault(metric, {})
            for kind in (_ALL, *kinds):
                if kind in by_kind or len(by_kind) < _KINDS_MAX:
                    count, total = by_kind.get(kind, (0.0, 0.0))
                    by_kind[kind] = (count + 1.0, total + value)

    def of(self, kinds: Sequence[str]) -> dict[str, float]:
        """Return the predicted value of each metric for a session whose prompt belongs to `kinds`."""
        return {metric: self._expected(by_kind, kinds) for metric, by_kind in self.table.items()}

    @staticmethod
    def _expected(by_kind: Mapping[str, tuple[float, float]], kinds: Sequence[str]) -> float:
        count, total = by_kind[_ALL]
        mean = total / count
        for kind in kinds:
            count, total = by_kind.get(kind, (0.0, 0.0))
            mean = (total + STRENGTH * mean) / (count + STRENGTH)
        return mean


def expectations(sessions: Iterable[tuple[Sequence[str], Mapping[str, float]]]) -> Expectations:
    """Collect the metric values of recorded sessions by kind of prompt.

    Args:
        sessions: for each session its kinds of prompt and its metric values.
    """
    table = Expectations()
    for kinds, values in sessions:
        table.update(kinds, values)
    return table


class ShadowFindings(Model):
    """Findings of a shadow in the form in which they are stored. All fields are empty without a shadow and while it is
    in progress."""

    state: ShadowState | None = None
    expected: dict[Text, dict[str, tuple[Finite, Finite]]] = Field(default_factory=dict)
    """Value of `Expectations.table`."""

    @classmethod
    def of(
        cls,
        estimate: ShadowEstimate,
        *,
        prompts: int,
        read: int,
        ended: Mapping[str, int],
        left_out: Mapping[str, int],
        tokens: int,
        expected: Mapping[str, Mapping[str, tuple[float, float]]],
    ) -> Self:
        state = ShadowState(
            prompts=prompts,
            read=read,
            pairs=estimate.pairs,
            spoke=estimate.spoke,
            ended=dict(ended),
            left_out=dict(left_out),
            tokens=tokens,
            judged=estimate.judged,
            effective=estimate.overlap.effective,
            mean_weight=estimate.overlap.mean,
            difference=estimate.difference,
            lower=estimate.lower,
            upper=estimate.upper,
            refused=estimate.refused,
        )
        return cls(state=state, expected={metric: dict(by_kind) for metric, by_kind in expected.items()})

    @property
    def expectations(self) -> Expectations:
        return Expectations({metric: dict(by_kind) for metric, by_kind in self.expected.items()})

    def statistics(self) -> dict[str, float]:
        """Return the numbers that are published with the decision that ends the shadow."""
        state = self.state
        if state is None:
            return {}
        numbers = {
            "shadow.prompts": float(state.prompts),
            "shadow.pairs": float(state.pairs),
            "shadow.spoke": float(state.spoke),
            "shadow.effective": state.effective,
            "shadow.mean_weight": state.mean_weight,
            "shadow.judged_difference": state.judged,
            "shadow.difference": state.difference,
            "shadow.lower": state.lower,
            "shadow.upper": state.upper,
        }
        return {name: value for name, value in numbers.items() if value is not None}

    def in_words(self) -> str:
        """Return the findings as a sentence, for the reason of the decision that ends the shadow."""
        state = self.state
        if state is None:
            return "no shadow"
        if state.refused is not None:
            return f"no estimate about users ({state.refused})"
        return f"users would be {state.difference:+.3f} satisfied, in [{state.lower:+.3f}, {state.upper:+.3f}]"
