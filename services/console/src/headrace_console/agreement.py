"""Agreement of the raters of a queue, of a judge with them, and of reward sources. Pure functions of the answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Any

from headrace_statistics.agreement import alpha, bootstrap_interval, kappa, nominal, raw_agreement, squared

COMMON_MIN = 30
"""Smallest number of items that two raters must have in common, because a coefficient of fewer is too uncertain."""
COLUMNS_MAX = 8
"""Largest number of raters and judges that are compared: those with the most answers."""
COMPARED_MAX = 200
"""Largest number of compared items of two sources. Their bootstrap takes a few hundredths of a second."""
Answers = Mapping[str, Mapping[str, Hashable]]
"""The answers to each item, by column. A column is a rater or a judge."""


@dataclass(frozen=True, slots=True)
class Coefficient:
    """A coefficient of agreement over items, with its bootstrap interval."""

    items: int
    value: float | None = None
    """None if there are too few items, or if all answers are the same."""
    interval: tuple[float, float] | None = None

    @property
    def has_too_few_items(self) -> bool:
        """Whether there are too few items to compute the coefficient."""
        return self.items < COMMON_MIN


@dataclass(frozen=True, slots=True)
class PairAgreement:
    """Agreement of two raters, judges or reward sources on the items that both have scored."""

    first: str
    second: str
    kappa: Coefficient
    raw: float | None
    """Share of the items with equal answers, or None if there are too few items."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Agreement of raters and judges on the items of one review queue."""

    columns: Mapping[str, Counter[Any]]
    """For each rater or judge, the number of items by answer."""
    alpha: Coefficient
    """Krippendorff's alpha of all raters, without judges."""
    pairs: Sequence[PairAgreement]


def agreement_of(answers: Answers, judges: Sequence[str], *, are_scores: bool, seed: int) -> Agreement:
    """Compute how well several raters and judges agree on the same items.

    Args:
        answers: for each item, the valid answers by the name of their rater or judge.
        judges: those of these names that belong to judges.
        are_scores: whether answers are numbers, which disagree by their squared difference. Other answers are only
            compared for equality.
        seed: seed of the bootstrap.
    """
    totals: dict[str, Counter[Any]] = {}
    for by_column in answers.values():
        for column, answer in by_column.items():
            totals.setdefault(column, Counter())[answer] += 1
    columns = sorted(totals, key=lambda column: (column in judges, -totals[column].total(), column))[:COLUMNS_MAX]
    difference: Callable[[Any, Any], float] = squared if are_scores else nominal
    units = [
        tuple(sorted(by_column[name] for name in columns if name in by_column and name not in judges))  # type: ignore[type-var]
        for by_column in answers.values()
    ]
    rated_twice = [unit for unit in units if len(unit) > 1]
    return Agreement(
        {column: totals[column] for column in columns},
        _coefficient(rated_twice, lambda table: alpha(table, difference), seed),
        [_pair(_common(answers.values(), pair), pair, difference, seed) for pair in combinations(columns, 2)],
    )


def least_agreeing_pairs(items: Collection[Mapping[str, float]], seed: int) -> list[PairAgreement]:
    """Return the pairs of columns by ascending kappa on the first `COMPARED_MAX` items that both have scored.

    Only the first pair has an interval, which takes longer than the rest. Pairs with too few common items, or
    with equal scores of all of them, are left out.

    Args:
        items: the scores of each item by column.
        seed: seed of the bootstrap.
    """
    totals = Counter(column for scores in items for column in scores)
    columns = sorted(column for column, _ in totals.most_common(COLUMNS_MAX))
    pairs: list[tuple[PairAgreement, list[tuple[Any, Any]]]] = []
    for pair in combinations(columns, 2):
        common = _common(items, pair)[:COMPARED_MAX]
        counts = Counter(common)
        value = kappa(counts, squared) if len(common) >= COMMON_MIN else None
        if value is not None:
            agreement = PairAgreement(*pair, Coefficient(len(common), value), raw_agreement(counts))
            pairs.append((agreement, common))
    pairs.sort(key=lambda item: item[0].kappa.value or 0.0)
    others = [agreement for agreement, _ in pairs[1:]]
    return [_score_pair(tuple(common), (pair.first, pair.second), seed) for pair, common in pairs[:1]] + others


@lru_cache(maxsize=64)
def _score_pair(common: tuple[tuple[Any, Any], ...], pair: tuple[str, str], seed: int) -> PairAgreement:
    """Return the agreement of two sources of scores. The result is cached, because the bootstrap is slow."""
    return _pair(common, pair, squared, seed)


def _common(items: Iterable[Mapping[str, Hashable]], pair: tuple[str, str]) -> list[tuple[Any, Any]]:
    """Return, for each item that both columns of the pair have answered, the two answers."""
    first, second = pair
    return [(answers[first], answers[second]) for answers in items if first in answers and second in answers]


def _pair(
    common: Sequence[tuple[Any, Any]], pair: tuple[str, str], difference: Callable[[Any, Any], float], seed: int
) -> PairAgreement:
    coefficient = _coefficient(common, lambda table: kappa(table, difference), seed)
    raw = None if coefficient.has_too_few_items else raw_agreement(Counter(common))
    return PairAgreement(*pair, coefficient, raw)


def _coefficient(
    items: Sequence[Any], statistic: Callable[[Mapping[Any, int]], float | None], seed: int
) -> Coefficient:
    if len(items) < COMMON_MIN:
        return Coefficient(len(items))
    value = statistic(Counter(items))
    interval = None if value is None else bootstrap_interval(items, statistic, seed=seed)
    return Coefficient(len(items), value, interval)
