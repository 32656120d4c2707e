"""Losses and advantages in NumPy, written from the equations of the papers, and of TRL and Trinity-RFT where these have
them.

Nothing in here knows our code. `frozen` are the logprobs that no gradient flows through: for a derivative by
differences they stay where they were.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Told:
    """One sequence: logprobs of its loss tokens, and what is said about it."""

    current: Floats
    start: Floats
    behaviour: Floats
    reference: Floats
    advantage: float
    written: bool = False
    pair: str = ""
    share: float = 1.0


Parameters = Mapping[str, Any]
Formula = Callable[[Sequence[Told], Sequence[Floats], Parameters], float]


def sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-value)))


def mean_of_tokens(losses: Sequence[Floats]) -> float:
    return float(np.concatenate(losses).mean())


def likelihood(told: Sequence[Told], _frozen: Sequence[Floats], _p: Parameters) -> float:
    """SFT with weights: the mean over tokens of - A log pi."""
    return mean_of_tokens([-one.advantage * one.current for one in told])


def clipped_tokens(one: Told, p: Parameters) -> Floats:
    """PPO with the clip of either side, weighted by min(pi_start / mu, c)."""
    weight = np.minimum(np.exp(one.start - one.behaviour), p["weight_max"])
    ratio = np.exp(one.current - one.start)
    bounded = np.clip(ratio, 1 - p["clip_low"], 1 + p["clip_high"])
    objective = np.minimum(ratio * one.advantage, bounded * one.advantage)
    if p.get("clip_dual") and one.advantage < 0:
        objective = np.maximum(objective, p["clip_dual"] * one.advantage)
    found: Floats = -weight * objective
    return found


def clipped(told: Sequence[Told], _frozen: Sequence[Floats], p: Parameters) -> float:
    return mean_of_tokens([clipped_tokens(one, p) for one in told])


def cispo(told: Sequence[Told], frozen: Sequence[Floats], p: Parameters) -> float:
    losses = []
    for one, still in zip(told, frozen, strict=True):
        weight = np.clip(np.exp(still - one.behaviour), 1 - p["clip_low"], 1 + p["clip_high"])
        losses.append(-weight * one.advantage * one.current)
    return mean_of_tokens(losses)


def gspo(told: Sequence[Told], _frozen: Sequence[Floats], p: Parameters) -> float:
    """Equation 5 of the paper: one ratio, the geometric mean of the tokens' ratios."""
    objectives = []
    for one in told:
        ratio = float(np.exp((one.current - one.behaviour).mean()))
        bounded = min(max(ratio, 1 - p["clip_low"]), 1 + p["clip_high"])
        objectives.append(one.share * min(ratio * one.advantage, bounded * one.advantage))
    return float(-sum(objectives) / sum(one.share for one in told))


def opmd(told: Sequence[Told], _frozen: Sequence[Floats], p: Parameters) -> float:
    return mean_of_tokens([-one.advantage * one.current / (1 + p["tau"]) for one in told])


def dpo(told: Sequence[Told], _frozen: Sequence[Floats], p: Parameters) -> float:
    """Equation 7 of the paper; with label smoothing as TRL's `sigmoid` loss has it."""
    pairs: dict[str, dict[bool, float]] = {}
    for one in told:
        pairs.setdefault(one.pair, {})[one.advantage > 0] = float((one.current - one.reference).sum())
    losses, smoothing = [], p["label_smoothing"]
    for both in pairs.values():
        margin = p["beta"] * (both[True] - both[False])
        losses.append(-(1 - smoothing) * np.log(sigmoid(margin)) - smoothing * np.log(sigmoid(-margin)))
    return float(np.mean(losses))


def kto(told: Sequence[Told], _frozen: Sequence[Floats], p: Parameters) -> float:
    """Equation 7 of the paper with a constant z; z = 0 is TRL's `apo_zero_unpaired`."""
    losses = []
    for one in told:
        gain = float((one.current - one.reference).sum()) - p["reference_point"]
        good = one.advantage > 0
        value = sigmoid(p["beta"] * (gain if good else -gain))
        losses.append((p["good_weight"] if good else p["bad_weight"]) * (1 - value))
    return float(np.mean(losses))


def mix(told: Sequence[Told], _frozen: Sequence[Floats], p: Parameters) -> float:
    """Trinity-RFT's: (1 - mu) of the mean over usual tokens, mu of the mean over an expert's."""
    usual = [clipped_tokens(one, p) for one in told if not one.written]
    expert = [-one.advantage * one.current for one in told if one.written]
    return float((1 - p["mu"]) * mean_of_tokens(usual) + p["mu"] * mean_of_tokens(expert))


FORMULAS: Mapping[str, Formula] = {
    "likelihood": likelihood,
    "clipped": clipped,
    "cispo": cispo,
    "gspo": gspo,
    "opmd": opmd,
    "dpo": dpo,
    "kto": kto,
    "mix": mix,
}


def aggregated(losses: Sequence[Floats], shares: Sequence[float], mode: str, horizon: int) -> float:
    """`loss_agg_mode` as verl and Trinity-RFT define it, where a sequence counts as much as it is of its run."""
    whole = sum(shares)
    sums = [float(loss.sum()) for loss in losses]
    means = [share * float(loss.mean()) for share, loss in zip(shares, losses, strict=True)]
    return {
        "token-mean": mean_of_tokens(losses),
        "seq-mean-token-sum": sum(sums) / whole,
        "seq-mean-token-mean": sum(means) / whole,
        "seq-mean-token-sum-norm": sum(sums) / whole / horizon,
    }[mode]


def divergence(kind: str, current: Floats, reference: Floats, behaviour: Floats) -> Floats:
    """John Schulman's estimators, by verl's names."""
    d = reference - current
    k3: Floats = np.exp(d) - 1 - d
    found: Mapping[str, Floats] = {
        "k1": -d,
        "k2": d**2 / 2,
        "k3": k3,
        "low_var_kl": np.clip(k3, -10, 10),
        "abs": np.abs(d),
        "corrected_k3": np.clip(np.exp(current - behaviour), 0, 2) * k3,
    }
    return found[kind]


def grpo(rewards: Sequence[float], floor: float | None) -> Floats:
    """Of one group: unbiased deviation, 1e-6 added to it."""
    r = np.array(rewards, float)
    scale = 1.0 if floor is None else max(r.std(ddof=1), floor) + 1e-6
    found: Floats = (r - r.mean()) / scale
    return found


def rloo(rewards: Sequence[float]) -> Floats:
    r = np.array(rewards, float)
    found: Floats = len(r) / (len(r) - 1) * (r - r.mean())
    return found


def opmd_advantages(rewards: Sequence[float], tau: float | None) -> Floats:
    r = np.array(rewards, float)
    found: Floats = r - (r.mean() if tau is None else tau * np.log(np.exp(r / tau).mean()))
    return found


def step_wise(
    rewards: Sequence[float], turns: Sequence[Sequence[float | None]], *, norm: bool, weight: float, decay: float
) -> list[Floats]:
    """Of one group whose runs are one branch each: the advantage of each turn."""
    runs = grpo(rewards, 0.01)
    stated = np.array([value for one in turns for value in one if value is not None], float)
    mean, scale = (stated.mean(), max(stated.std(ddof=1), 0.01) + 1e-6) if len(stated) > 1 else (0.0, np.inf)
    found = []
    for advantage, one in zip(runs, turns, strict=True):
        own = np.array([0.0 if value is None else (value - mean) / scale for value in one])
        credit = [sum(decay ** (j - k) * own[j] for j in range(k, len(own))) for k in range(len(own))]
        found.append(advantage / (len(one) if norm else 1) + weight * np.array(credit))
    return found


def gae(values: Floats, reward: float, gamma: float, lam: float) -> Floats:
    """Equation 16 of the paper: the sum of all later differences, written out."""
    rewards = np.zeros(len(values))
    rewards[-1] = reward
    following = np.append(values[1:], 0.0)
    delta = rewards + gamma * following - values
    return np.array(
        [sum((gamma * lam) ** (j - t) * delta[j] for j in range(t, len(values))) for t in range(len(values))]
    )
