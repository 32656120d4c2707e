"""Rewards that depend on the length of an answer."""

from __future__ import annotations

import re

_STEP = re.compile(r"^[ \t]*(?:(?:step\s*)?\d+[.):]|[-*\u2022])[ \t]+(\S.*)$", re.IGNORECASE | re.MULTILINE)


def length_penalty(reward: float, length: int, *, length_max: int = 1024, weight: float = 0.001) -> float:
    """Return the reward minus `weight` times the relative excess of `length` over `length_max`.

    The penalty never makes a reward negative, and a negative reward is unchanged.
    """
    over = max(0, length - length_max) / length_max
    return max(min(reward, 0.0), reward - weight * over)


def steps(reward: float, answer: str, *, bonus: float = 0.1, most: float = 0.5) -> float:
    """Return the reward plus `bonus` for each different step that the answer lists, up to `most` in total.

    Only a positive reward gets the bonus. Otherwise a model would learn to write steps instead of right answers.
    """
    if reward <= 0:
        return reward
    written = {step.strip().casefold() for step in _STEP.findall(answer)}
    return reward + min(bonus * len(written), most)
