"""How good was a run? What of its call was right, what that is worth, and how many of the mails it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from email_search.queries import Query
from email_search.tools import DEFINITIONS, mails_in
from headrace.rewards import ToolScore, tool_score
from headrace_schemas import Message, Tool

WORTH: Mapping[str, float] = {"correct_tool": 1.0, "correct_args": 0.5, "tool_success": 1.0, "invalid_tool": -2.0}
"""A good call earns 2.5."""
_OFFERED = [Tool.model_validate(one) for one in DEFINITIONS]
R = TypeVar("R")


def scored(query: Query, messages: Sequence[Any]) -> ToolScore:
    """What was right in a conversation, for people and for rewards."""
    wanted = {"name": query.tool, "arguments": query.arguments}
    return tool_score([Message.model_validate(one) for one in messages], _OFFERED, [wanted])


def parts(score: ToolScore) -> dict[str, float]:
    """What the run earned, part by part. Where no call was made, nothing."""
    found = {
        "correct_tool": score.tool,
        "correct_args": score.arguments,
        "tool_success": score.success,
        "invalid_tool": score.invalid,
    }
    return {name: WORTH[name] * (share or 0.0) for name, share in found.items()}


def recall(query: Query, messages: Sequence[Any]) -> int:
    """How many of the relevant mails a tool showed."""
    answers = [str(one["content"]) for one in messages if one["role"] == "tool"]
    return len(query.relevant & set().union(*map(mails_in, answers)))


def best_and_worst(rewarded: Sequence[tuple[float, R]]) -> tuple[R, R] | None:
    """Of the runs of one query the one that earned most and the one that earned least; None where all earned alike."""
    best, worst = max(rewarded, key=lambda one: one[0]), min(rewarded, key=lambda one: one[0])
    return (best[1], worst[1]) if best[0] > worst[0] else None
