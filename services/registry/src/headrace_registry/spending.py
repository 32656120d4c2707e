"""How the error probability of a family of versions is spent, so that however many are tried, it is not exceeded.

A family is all versions that are compared with the same anchor. The k-th one may be promoted wrongly with probability
α_k at most, and Σ α_k ≤ α without an end to k: Bonferroni with unequal shares (alpha spending as in Foster & Stine
2008, without earning any back). The shares 1/(k(k+1)) = 1/k - 1/(k+1) telescope to 1, and the k-th version pays for
its place with about 2 ln k more evidence.
"""

from __future__ import annotations

_FOR_PROMOTIONS = 0.8
"""The rest pays for mistaking a version for better than the anchor, which would become the anchor then."""


def promotion(alpha: float, number: int) -> float:
    """How probable it may be that the `number`-th version of a family, counted from 1, is promoted wrongly."""
    return _FOR_PROMOTIONS * alpha * _share(number)


def succession(alpha: float, number: int) -> float:
    """How probable it may be that the `number`-th version of a family becomes the anchor without being better."""
    return (1.0 - _FOR_PROMOTIONS) * alpha * _share(number)


def refusal(beta: float, opponents: int) -> float:
    """How probable it may be that an equal version is found inferior to one of its opponents.

    Half of β: the other half is for not getting done within `tasks_max`.
    """
    return beta / 2.0 / opponents


def success(alpha: float, number: int, metrics: int) -> float:
    """How probable it may be that one of a rollout's success metrics is wrongly found good enough.

    Any of them is enough for a promotion, so they share what the `number`-th version may spend on being promoted.
    """
    return promotion(alpha, number) / metrics


def harm(beta: float, share: float) -> float:
    """How probable it may be that a version without harm is rolled back by one test, which has that share of all.

    All of β: a rollout that finds nothing in time ends in hold, and takes nothing back.
    """
    return beta * share


def _share(number: int) -> float:
    return 1.0 / (number * (number + 1))
