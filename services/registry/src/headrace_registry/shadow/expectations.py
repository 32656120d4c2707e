"""What a session may be expected to be like, before anybody knows which arm it is in: the covariate of its canary.

The shadow has played prompts of the traffic with both versions. What came of them is kept by kind of prompt: the agent
(its system prompt and tools), the task, the opening. A session of the canary is expected to be like others of its
kind, the mean of the kind drawn towards that of the kind above it, as if that had been seen `STRENGTH` times
(shrinkage: Efron & Morris, "Stein's paradox in statistics", 1977). Only its first turn is looked at, which is there
before any version has said a word.

`rollouts.contrast` takes the expected part out of each unit's value. Nothing there depends on the expectation being
right: it costs or saves sessions, and moves no error rate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from headrace_schemas import Turn

STRENGTH = 2.0
_ALL = ""
_KINDS_MAX = 4096
"""Of those seen first; later ones have the mean of the kind above them."""


def kinds(turn: Turn) -> tuple[str, ...]:
    """Of a session's first turn, from the general to the special."""
    users = next((at for at, one in enumerate(turn.messages) if one.role == "user"), len(turn.messages))
    agent = hashlib.sha256()
    for message in turn.messages[:users]:
        agent.update(message.model_dump_json(exclude_none=True).encode() + b"\n")
    for name in sorted(tool.function.name for tool in turn.tools):
        agent.update(name.encode() + b"\n")
    opening = agent.copy()
    for message in turn.messages[users : users + 1]:
        opening.update(message.model_dump_json(exclude_none=True).encode())
    found = [f"agent:{agent.hexdigest()[:16]}"]
    if turn.task_id:
        found.append(f"task:{hashlib.sha256(turn.task_id.encode()).hexdigest()[:16]}")
    return (*found, f"opening:{opening.hexdigest()[:16]}")


@dataclass(slots=True)
class Expectations:
    """Of one rollout. `table`: metric, then kind, then how many values were seen and their sum."""

    table: dict[str, dict[str, tuple[float, float]]] = field(default_factory=dict)

    def see(self, of: Sequence[str], values: Mapping[str, float]) -> None:
        """One session of these kinds, whoever answered."""
        for metric, value in values.items():
            seen = self.table.setdefault(metric, {})
            for kind in (_ALL, *of):
                if kind in seen or len(seen) < _KINDS_MAX:
                    count, total = seen.get(kind, (0.0, 0.0))
                    seen[kind] = (count + 1.0, total + value)

    def of(self, kinds: Sequence[str]) -> dict[str, float]:
        """What each metric is expected to be; nothing of a metric that was never seen."""
        return {metric: self._expected(seen, kinds) for metric, seen in self.table.items()}

    @staticmethod
    def _expected(seen: Mapping[str, tuple[float, float]], kinds: Sequence[str]) -> float:
        count, total = seen[_ALL]
        mean = total / count
        for kind in kinds:
            count, total = seen.get(kind, (0.0, 0.0))
            mean = (total + STRENGTH * mean) / (count + STRENGTH)
        return mean


def expectations(sessions: Iterable[tuple[Sequence[str], Mapping[str, float]]]) -> Expectations:
    """Of sessions with their kinds and the values of their metrics."""
    made = Expectations()
    for of, values in sessions:
        made.see(of, values)
    return made
