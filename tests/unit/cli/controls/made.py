"""Experiences with given rewards."""

from __future__ import annotations

from datetime import UTC, datetime

from headrace_schemas import Branch, Experience, RewardPart, Span
from headrace_schemas.values.ids import session_key

VERSION = "m@000000000000"


def experience(number: int, reward: float | None, **parts: float) -> Experience:
    """Create an experience of one task and one turn. `parts` are rewards by source."""
    branch = Branch(token_ids=(1, 2, 3), spans=(Span(start=1, logprobs=(-0.5, -0.5), turn_id="t", version=VERSION),))
    return Experience(
        time=datetime(2026, 11, 20, tzinfo=UTC),
        experience_id=f"e{number}",
        trajectory_id=f"t{number}",
        session_key=session_key("default", str(number)),
        session_id=str(number),
        model="m",
        branch=branch,
        reward=reward,
        no_reward="no_reward" if reward is None else None,
        parts=tuple(RewardPart(source=name, value=value, weight=1.0) for name, value in parts.items()),
    )


def rewards(experiences: list[Experience]) -> list[float | None]:
    return [experience.reward for experience in experiences]
