"""Features of runs as columns of numbers, without those that only runs with thumbs have.

A feature gives up to two columns: its value, where it is known, and whether it is known at all. Both are standardized
over all runs; what is not known stands at the mean. Shapes: `_R` runs, `_D` columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from headrace_scorer.learned.column import Column
from headrace_scorer.learned.models import Features

Array = npt.NDArray[np.float64]
COLUMNS_MAX = 48
_BINS = 10
_OTHERS_MIN = 50
_RARE = 0.01
_FOREIGN_MAX = 0.1


def table(columns: Sequence[Column], runs: Iterable[Features]) -> Array:
    """A row of `_D` numbers for each run."""
    rows = [[column.of(run) for column in columns] for run in runs]
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(columns))


def columns_of(thumbed: Sequence[Features], others: Sequence[Features]) -> tuple[list[Column], list[str]]:
    """The columns to learn from, and the names of features that were refused because they tell who has a thumb.

    Of too many, those that most runs have.
    """
    everyone = [*thumbed, *others]
    counts: dict[str, int] = {}
    for run in everyone:
        for name in run:
            counts[name] = counts.get(name, 0) + 1
    refused = [name for name in sorted(counts) if foreign_share(name, thumbed, others) > _FOREIGN_MAX]
    found: list[Column] = []
    for name in sorted(counts.keys() - set(refused), key=lambda one: (-counts[one], one)):
        found += _standardized(name, counts[name], everyone)
    return found[:COLUMNS_MAX], refused


def foreign_share(name: str, thumbed: Sequence[Features], others: Sequence[Features]) -> float:
    """How many of the runs with thumbs have a value that others (nearly) never have.

    A feature that was made of the thumb itself is of this kind, because others have no thumb; so is one that came with
    the feedback. It would look perfect where it is learned, and say nothing where it is asked. Values are compared in
    ten bins with equally many thumbed runs; not to be known is a bin of its own.
    """
    if len(others) < _OTHERS_MIN or not thumbed:
        return 0.0
    known = np.array([run[name] for run in thumbed if name in run])
    elsewhere = np.array([run[name] for run in others if name in run])
    absent = 1 - len(known) / len(thumbed)
    share = absent if 1 - len(elsewhere) / len(others) < _RARE else 0.0
    if not len(known):
        return share
    values = np.unique(known)
    edges = values if len(values) <= _BINS else np.unique(np.quantile(known, np.linspace(0, 1, _BINS + 1)))
    exact = len(values) <= _BINS
    own = _binned(known, edges, exact=exact)
    theirs = _binned(elsewhere, edges, exact=exact) / len(others)
    return float(share + own[theirs < _RARE].sum() / len(thumbed))


def _binned(values: Array, edges: Array, *, exact: bool) -> Array:
    """Counts; `exact`: of values that equal an edge, else of those between two edges."""
    if exact:
        return np.array([(np.abs(values - edge) < 1e-9).sum() for edge in edges], dtype=np.float64)
    return np.histogram(values, edges)[0].astype(np.float64)


def _standardized(name: str, known: int, everyone: Sequence[Features]) -> Iterable[Column]:
    values = [run[name] for run in everyone if name in run]
    mean = math.fsum(values) / known
    deviation = math.sqrt(math.fsum((one - mean) ** 2 for one in values) / known)
    if deviation > 1e-9 * max(1.0, abs(mean)):
        yield Column(name, presence=False, mean=mean, deviation=deviation, is_reward="/" not in name)
    share = known / len(everyone)
    if 0 < share < 1:
        yield Column(name, presence=True, mean=share, deviation=math.sqrt(share * (1 - share)))
