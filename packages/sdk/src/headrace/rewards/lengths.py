"""Rewards that depend on how long an answer is."""

from __future__ import annotations

import re

_STEP = re.compile(r"^[ \t]*(?:(?:step\s*)?\d+[.):]|[-*\u2022])[ \t]+(\S.*)$", re.IGNORECASE | re.MULTILINE)


def length_penalty(reward: float, length: int, *, length_max: int = 1024, weight: float = 0.001) -> float:
    """The reward less `weight` times what is over `length_max`, as a share of it.

    A reward is never made negative by it, and one that is negative already is not changed.
    """
    over = max(0, length - length_max) / length_max
    return max(min(reward, 0.0), reward - weight * over)


def steps(reward: float, answer: str, *, bonus: float = 0.1, most: float = 0.5) -> float:
    """The reward with a bonus for each different step that the answer writes out as a list item, up to `most` in all.

    Only where the answer is right to begin with: paid for alone, steps are what a model learns to write.
    """
    if reward <= 0:
        return reward
    written = {step.strip().casefold() for step in _STEP.findall(answer)}
    return reward + min(bonus * len(written), most)
