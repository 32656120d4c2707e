"""Features of a run for a reward model: its shape, and the values of sources other than people. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from itertools import pairwise
from typing import Any

from headrace_schemas import Trajectory

FEATURES_MAX = 128


def shape_of(trajectory: Trajectory) -> dict[str, float]:
    """Return the lengths and counts of a run, each as log(1 + count), and whether it repeated a tool call."""
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
    features = {f"run/{name}": math.log1p(count) for name, count in counts.items()}
    calls = [_calls(message) for message in messages if message.role == "assistant" and message.tool_calls]
    if calls:
        features["run/calls again"] = float(any(earlier == later for earlier, later in pairwise(calls)))
    return features


def features_of(
    trajectory: Trajectory, rows: Iterable[Mapping[str, Any]], counts: Callable[[str], bool]
) -> dict[str, float]:
    """Return the features of a run, at most `FEATURES_MAX`, sorted by name.

    Rewards from feedback are never features, because they are the target of the model.

    Args:
        rows: rewards of the run as rows of the ledger.
        counts: returns whether the rewards of a source are features.
    """
    features = shape_of(trajectory)
    for row in rows:
        if row["turn_id"] or row["feedback_id"] is not None or row["outcome"] != "scored" or not counts(row["source"]):
            continue
        features[row["source"]] = float(row["value"])
        criteria = json.loads(row["criteria"]) if row["criteria"] else {}
        features |= {f"{row['source']}/{name}": float(value) for name, value in criteria.items()}
    return dict(sorted(features.items())[:FEATURES_MAX])


def _calls(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]
