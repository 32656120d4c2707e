"""Reward function for Trinity's own Python. It imports no package of Headrace."""

from __future__ import annotations

from typing import Any

from trinity.common.rewards.reward_fn import RewardFn

from tests.trinity.vowels import share_of_vowels


class Vowels(RewardFn):  # type: ignore[misc]
    """The share of vowels in the answer."""

    def __init__(self) -> None:
        """Trinity's has an abstract one."""

    def __call__(self, response: str, **_: Any) -> dict[str, float]:
        return {"vowels": share_of_vowels(response)}
