"""Rewards of a run by part, the weights of the parts, and the number of relevant mails that the run found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from email_search.queries import DEFINITIONS, Query, mails_in
from headrace.rewards import ToolScore, tool_score
from headrace_schemas import Message, Tool

WORTH: Mapping[str, float] = {"correct_tool": 1.0, "correct_args": 0.5, "tool_success": 1.0, "invalid_tool": -2.0}
"""Value of each part. A right call has a reward of 2.5."""
_OFFERED = [Tool.model_validate(tool) for tool in DEFINITIONS]
R = TypeVar("R")


def score_calls(query: Query, messages: Sequence[Any]) -> ToolScore:
    """Return the tool score of a conversation."""
    expected_call = {"name": query.tool, "arguments": query.arguments}
    return tool_score([Message.model_validate(message) for message in messages], _OFFERED, [expected_call])


def parts(score: ToolScore) -> dict[str, float]:
    """Return the reward of the run by part, 0 for parts that do not apply."""
    shares = {
        "correct_tool": score.tool,
        "correct_args": score.arguments,
        "tool_success": score.success,
        "invalid_tool": score.invalid,
    }
    return {name: WORTH[name] * (share or 0.0) for name, share in shares.items()}


def recall(query: Query, messages: Sequence[Any]) -> int:
    """Return how many of the relevant mails were in tool results."""
    answers = [str(message["content"]) for message in messages if message["role"] == "tool"]
    return len(query.relevant & set().union(*map(mails_in, answers)))


def best_and_worst(rewarded: Sequence[tuple[float, R]]) -> tuple[R, R] | None:
    """Return the runs with the highest and the lowest reward, or None if all rewards are equal."""
    best, worst = max(rewarded, key=lambda pair: pair[0]), min(rewarded, key=lambda pair: pair[0])
    return (best[1], worst[1]) if best[0] > worst[0] else None
