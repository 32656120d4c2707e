"""Alpha spending: how the error probability of a family of versions is shared, however many versions are tried.

A family is all versions that are compared with the same anchor. The k-th one may be promoted wrongly with probability
α_k at most, and Σ α_k ≤ α without an end to k: Bonferroni with unequal shares (alpha spending as in Foster & Stine
2008, without earning any back). The shares 1/(k(k+1)) = 1/k - 1/(k+1) telescope to 1, and the k-th version pays for
its place with about 2 ln k more evidence.
"""

from __future__ import annotations

_FOR_PROMOTIONS = 0.8
"""Share of α for wrong promotions. The rest is for wrongly finding a version better than the anchor (`succession`)."""


def promotion(alpha: float, number: int) -> float:
    """Return the error probability for promoting the `number`-th version of a family wrongly. Numbers start at 1."""
    return _FOR_PROMOTIONS * alpha * _share(number)


def succession(alpha: float, number: int) -> float:
    """Return the error probability for making the `number`-th version of a family the anchor although it is not
    better."""
    return (1.0 - _FOR_PROMOTIONS) * alpha * _share(number)


def refusal(beta: float, opponents: int) -> float:
    """Return the error probability for finding an equal version inferior to one of its opponents.

    The result is half of β. The other half is for trials that are undecided after `tasks_max`.
    """
    return beta / 2.0 / opponents


def success(alpha: float, number: int, metrics: int) -> float:
    """Return the error probability for one success metric of a rollout.

    Any success metric is enough for a promotion, so the metrics share what the `number`-th version may spend.
    """
    return promotion(alpha, number) / metrics


def harm(beta: float, share: float) -> float:
    """Return the error probability for rolling back a harmless version by one test that has `share` of all tests.

    All of β is spent here: a rollout without a result in time ends in hold and is not rolled back.
    """
    return beta * share


def _share(number: int) -> float:
    return 1.0 / (number * (number + 1))
