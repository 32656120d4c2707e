"""Versions and tasks that exist on paper only: scores of many runs at once, drawn with a known truth.

A task is as hard for one version as for another: success is a latent normal variable, of which the task and its seed
give the share `SHARED`, that exceeds what the version's true score asks for. At 0.5 and 0.5 shared, the scores of two
versions on the same task have a correlation of (2/π) asin(0.5) = 0.33.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
SHARED = 0.5


def thresholds(true: Floats) -> Floats:
    """What a version of that true score has to stay below, elementwise."""
    values, places = np.unique(np.clip(true, 1e-9, 1 - 1e-9), return_inverse=True)
    limits: Floats = np.array([NormalDist().inv_cdf(float(value)) for value in values])[places].reshape(true.shape)
    return limits


def scores(draw: np.random.Generator, limits: Floats, hardness: Floats) -> Floats:
    """0 or 1 for each of `limits` (players by runs), where all players of a run meet one task of that hardness."""
    own: Floats = draw.standard_normal(limits.shape)
    won: Floats = (SHARED**0.5 * hardness + (1 - SHARED) ** 0.5 * own < limits).astype(np.float64)
    return won
