"""Rank statistics of scores."""

from __future__ import annotations

import numpy as np


def auroc(score: np.ndarray, good: np.ndarray) -> float:
    """Return the probability that a good item has a higher score than another item; ties count half."""
    up, down = score[good], score[~good]
    return float((up[:, None] > down).mean() + 0.5 * (up[:, None] == down).mean())
