"""What is known of a run besides what people said: its shape, and what other sources made of it. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

from headrace_schemas import Trajectory

FEATURES_MAX = 128


def shape_of(trajectory: Trajectory) -> dict[str, float]:
    """How long it was and who spoke how often. Counts are logarithms of one more, so that ten times is a step."""
    messages = trajectory.messages
    roles = [message.role for message in messages]
    counts = {
        "turns": len(trajectory.turn_ids),
        "tokens": sum(len(span.logprobs) for branch in trajectory.branches for span in branch.spans),
        "answer characters": len(trajectory.final_answer),
        "user messages": roles.count("user"),
        "tool results": roles.count("tool"),
        "branches": len(trajectory.branches),
    }
    found = {f"run/{name}": math.log1p(count) for name, count in counts.items()}
    calls = [_calls(message) for message in messages if message.role == "assistant" and message.tool_calls]
    if calls:
        found["run/calls again"] = float(any(one == other for one, other in pairwise(calls)))
    return found


def features_of(
    trajectory: Trajectory, rows: Iterable[Mapping[str, Any]], counts: Callable[[str], bool]
) -> dict[str, float]:
    """The run's shape, and the value and criteria of each source that `counts`. `rows` are those of the ledger.

    What was made from feedback is never a feature: it is what is to be learned. Of too many, the first by name.
    """
    found = shape_of(trajectory)
    for row in rows:
        if row["turn_id"] or row["feedback_id"] is not None or row["outcome"] != "scored" or not counts(row["source"]):
            continue
        found[row["source"]] = float(row["value"])
        criteria = json.loads(row["criteria"]) if row["criteria"] else {}
        found |= {f"{row['source']}/{name}": float(value) for name, value in criteria.items()}
    return dict(sorted(found.items())[:FEATURES_MAX])


def _calls(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]
