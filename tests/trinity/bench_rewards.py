"""Reward function for Trinity's own Python. It imports no package of Headrace.

Score of the test's bench: a number that follows from the answer's text.
"""

from __future__ import annotations

from typing import Any

from trinity.common.rewards.reward_fn import RewardFn


def share_of_vowels(text: str) -> float:
    return sum(letter in "aeiouAEIOU" for letter in text) / len(text) if text else 0.0


class Vowels(RewardFn):  # type: ignore[misc]
    """The share of vowels in the answer."""

    def __init__(self) -> None:
        """Trinity's has an abstract one."""

    def __call__(self, response: str, **_: Any) -> dict[str, float]:
        return {"vowels": share_of_vowels(response)}
