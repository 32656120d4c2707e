"""Alpha spending: how the error probability of a family of versions is shared, however many versions are tried.

A family is all versions that are compared with the same anchor. The k-th one may be promoted wrongly with probability
α_k at most, and Σ α_k ≤ α without an end to k: Bonferroni with unequal shares (alpha spending as in Foster & Stine
2008, without earning any back). The shares 1/(k(k+1)) = 1/k - 1/(k+1) telescope to 1, and the k-th version pays for
its place with about 2 ln k more evidence.
"""

from __future__ import annotations

_FOR_PROMOTIONS = 0.8
"""The share for wrong promotions. The rest is for wrongly finding a version better than the anchor (`succession`)."""


def promotion(alpha: float, number: int) -> float:
    """The error for promoting the `number`-th version of a family wrongly; numbers start at 1."""
    return _FOR_PROMOTIONS * alpha * _share(number)


def succession(alpha: float, number: int) -> float:
    """The error for making the `number`-th version of a family the anchor although it is not better."""
    return (1.0 - _FOR_PROMOTIONS) * alpha * _share(number)


def refusal(beta: float, opponents: int) -> float:
    """The error for finding an equal version inferior to one of its opponents.

    It is half of β. The other half is for trials that are undecided after `tasks_max`.
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
