"""Features of a run for a reward model, and standardized columns of numbers computed from them.

Features that reveal whether a run has a thumb are left out. A feature gives up to two columns: its value, and whether
the run has it. Both are standardized over all runs; a missing value is replaced by the mean. Shapes: `_R` runs, `_D`
columns.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace_schemas import Trajectory
from headrace_scorer.learned.models import Column, Features

Array = npt.NDArray[np.float64]
COLUMNS_MAX = 48
_BINS = 10
_UNRATED_MIN = 50
_RARE = 0.01
_FOREIGN_MAX = 0.1
FEATURES_MAX = 128


def feature_table(columns: Sequence[Column], runs: Iterable[Features]) -> Array:
    """Return the feature table of runs, `[R, D]`: a row for each run and a number for each column."""
    rows = [[column.of(run) for column in columns] for run in runs]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(columns))


def columns_of(thumbed: Sequence[Features], unrated: Sequence[Features]) -> tuple[list[Column], list[str]]:
    """Choose the features from which a reward model learns.

    The features that most runs have come first, up to `COLUMNS_MAX` columns.

    Args:
        thumbed: features of the runs with thumbs.
        unrated: features of the runs without thumbs.

    Returns:
        The columns of the chosen features, and the names of the features that were refused because they reveal whether
        a run has a thumb.
    """
    all_runs = [*thumbed, *unrated]
    counts: dict[str, int] = {}
    for run in all_runs:
        for name in run:
            counts[name] = counts.get(name, 0) + 1
    refused = [name for name in sorted(counts) if foreign_share(name, thumbed, unrated) > _FOREIGN_MAX]
    columns: list[Column] = []
    for name in sorted(counts.keys() - set(refused), key=lambda feature: (-counts[feature], feature)):
        columns += _standardized_columns(name, counts[name], all_runs)
    return columns[:COLUMNS_MAX], refused


def foreign_share(name: str, thumbed: Sequence[Features], unrated: Sequence[Features]) -> float:
    """Return the share of the runs with thumbs whose value of a feature is rare among the runs without thumbs.

    A feature that was computed from the thumb, or that came with the feedback, has such values. A model would predict
    its training data from it perfectly, and could not use it for other runs. Values are compared in ten bins with equal
    numbers of runs with thumbs. A missing value is a bin of its own.
    """
    if len(unrated) < _UNRATED_MIN or not thumbed:
        return 0.0
    thumbed_values = np.array([run[name] for run in thumbed if name in run])
    unrated_values = np.array([run[name] for run in unrated if name in run])
    absent = 1 - len(thumbed_values) / len(thumbed)
    share = absent if 1 - len(unrated_values) / len(unrated) < _RARE else 0.0
    if not len(thumbed_values):
        return share
    values = np.unique(thumbed_values)
    exact = len(values) <= _BINS
    edges = values if exact else np.unique(np.quantile(thumbed_values, np.linspace(0, 1, _BINS + 1)))
    thumbed_counts = _count_bins(thumbed_values, edges, exact=exact)
    unrated_shares = _count_bins(unrated_values, edges, exact=exact) / len(unrated)
    return float(share + thumbed_counts[unrated_shares < _RARE].sum() / len(thumbed))


def _count_bins(values: Array, edges: Array, *, exact: bool) -> Array:
    """Return the number of values in each bin: those equal to each edge (`exact`), or else those between two edges."""
    if exact:
        return np.array([(np.abs(values - edge) < 1e-9).sum() for edge in edges], dtype=np.float64)
    return np.histogram(values, edges)[0].astype(np.float64)


def _standardized_columns(name: str, count: int, all_runs: Sequence[Features]) -> Iterable[Column]:
    """Yield the standardized columns of a feature that `count` runs have. Constant columns are left out."""
    values = [run[name] for run in all_runs if name in run]
    mean = math.fsum(values) / count
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / count)
    if deviation > 1e-9 * max(1.0, abs(mean)):
        yield Column(name, presence=False, mean=mean, deviation=deviation, is_reward="/" not in name)
    share = count / len(all_runs)
    if 0 < share < 1:
        yield Column(name, presence=True, mean=share, deviation=math.sqrt(share * (1 - share)))


def shape_of(trajectory: Trajectory) -> dict[str, float]:
    """Return features of the shape of a run: lengths and counts as log(1 + count), and whether it repeated a tool
    call."""
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
    """Return all features of a run, at most `FEATURES_MAX`, sorted by name.

    Rewards from feedback are never features, because they are the target of the model.

    Args:
        rows: rewards of the run as rows of the ledger.
        counts: function that returns whether the rewards of a source are features.
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
