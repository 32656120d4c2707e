"""How well a score orders what is good before what is not."""

from __future__ import annotations

import numpy as np


def auroc(score: np.ndarray, good: np.ndarray) -> float:
    up, down = score[good], score[~good]
    return float((up[:, None] > down).mean() + 0.5 * (up[:, None] == down).mean())
