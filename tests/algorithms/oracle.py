"""Losses and advantages in NumPy, written from the equations of the papers, and of TRL and Trinity-RFT where these have
them.

The module imports no code of Headrace. `frozen` are the logprobs without a gradient: a derivative by differences
leaves them unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SequenceTerms:
    """Terms of one sequence: logprobs of its loss tokens, its advantage and its pair."""

    current: Floats
    start: Floats
    behaviour: Floats
    reference: Floats
    advantage: float
    written: bool = False
    pair: str = ""
    share: float = 1.0


Parameters = Mapping[str, Any]
Formula = Callable[[Sequence[SequenceTerms], Sequence[Floats], Parameters], float]


def sigmoid(value: float) -> float:
    return float(1 / (1 + np.exp(-value)))


def mean_of_tokens(losses: Sequence[Floats]) -> float:
    return float(np.concatenate(losses).mean())


def likelihood(sequences: Sequence[SequenceTerms], _frozen: Sequence[Floats], _p: Parameters) -> float:
    """SFT with weights: the mean over tokens of - A log pi."""
    return mean_of_tokens([-sequence.advantage * sequence.current for sequence in sequences])


def clipped_tokens(sequence: SequenceTerms, p: Parameters) -> Floats:
    """PPO with the clip of either side, weighted by min(pi_start / mu, c)."""
    weight = np.minimum(np.exp(sequence.start - sequence.behaviour), p["weight_max"])
    ratio = np.exp(sequence.current - sequence.start)
    bounded = np.clip(ratio, 1 - p["clip_low"], 1 + p["clip_high"])
    objective = np.minimum(ratio * sequence.advantage, bounded * sequence.advantage)
    if p.get("clip_dual") and sequence.advantage < 0:
        objective = np.maximum(objective, p["clip_dual"] * sequence.advantage)
    losses: Floats = -weight * objective
    return losses


def clipped(sequences: Sequence[SequenceTerms], _frozen: Sequence[Floats], p: Parameters) -> float:
    return mean_of_tokens([clipped_tokens(sequence, p) for sequence in sequences])


def cispo(sequences: Sequence[SequenceTerms], frozen: Sequence[Floats], p: Parameters) -> float:
    losses = []
    for sequence, still in zip(sequences, frozen, strict=True):
        weight = np.clip(np.exp(still - sequence.behaviour), 1 - p["clip_low"], 1 + p["clip_high"])
        losses.append(-weight * sequence.advantage * sequence.current)
    return mean_of_tokens(losses)


def gspo(sequences: Sequence[SequenceTerms], _frozen: Sequence[Floats], p: Parameters) -> float:
    """Equation 5 of the paper: one ratio, the geometric mean of the tokens' ratios."""
    objectives = []
    for sequence in sequences:
        ratio = float(np.exp((sequence.current - sequence.behaviour).mean()))
        bounded = min(max(ratio, 1 - p["clip_low"]), 1 + p["clip_high"])
        objectives.append(sequence.share * min(ratio * sequence.advantage, bounded * sequence.advantage))
    return float(-sum(objectives) / sum(sequence.share for sequence in sequences))


def opmd(sequences: Sequence[SequenceTerms], _frozen: Sequence[Floats], p: Parameters) -> float:
    return mean_of_tokens([-sequence.advantage * sequence.current / (1 + p["tau"]) for sequence in sequences])


def dpo(sequences: Sequence[SequenceTerms], _frozen: Sequence[Floats], p: Parameters) -> float:
    """Equation 7 of the paper; with label smoothing as TRL's `sigmoid` loss has it."""
    pairs: dict[str, dict[bool, float]] = {}
    for sequence in sequences:
        pairs.setdefault(sequence.pair, {})[sequence.advantage > 0] = float(
            (sequence.current - sequence.reference).sum()
        )
    losses, smoothing = [], p["label_smoothing"]
    for both in pairs.values():
        margin = p["beta"] * (both[True] - both[False])
        losses.append(-(1 - smoothing) * np.log(sigmoid(margin)) - smoothing * np.log(sigmoid(-margin)))
    return float(np.mean(losses))


def kto(sequences: Sequence[SequenceTerms], _frozen: Sequence[Floats], p: Parameters) -> float:
    """Equation 7 of the paper with a constant z; z = 0 is TRL's `apo_zero_unpaired`."""
    losses = []
    for sequence in sequences:
        gain = float((sequence.current - sequence.reference).sum()) - p["reference_point"]
        good = sequence.advantage > 0
        value = sigmoid(p["beta"] * (gain if good else -gain))
        losses.append((p["good_weight"] if good else p["bad_weight"]) * (1 - value))
    return float(np.mean(losses))


def mix(sequences: Sequence[SequenceTerms], _frozen: Sequence[Floats], p: Parameters) -> float:
    """Trinity-RFT's: (1 - mu) of the mean over usual tokens, mu of the mean over an expert's."""
    usual = [clipped_tokens(sequence, p) for sequence in sequences if not sequence.written]
    expert = [-sequence.advantage * sequence.current for sequence in sequences if sequence.written]
    return float((1 - p["mu"]) * mean_of_tokens(usual) + p["mu"] * mean_of_tokens(expert))


FORMULAS: Mapping[str, Formula] = {
    "likelihood": likelihood, "clipped": clipped, "cispo": cispo, "gspo": gspo, "opmd": opmd, "dpo": dpo, "kto": kto,
    "mix": mix,
}  # fmt: skip


def aggregated(losses: Sequence[Floats], shares: Sequence[float], mode: str, horizon: int) -> float:
    """`loss_agg_mode` as verl and Trinity-RFT define it, where a sequence counts as much as it is of its run."""
    total = sum(shares)
    sums = [float(loss.sum()) for loss in losses]
    means = [share * float(loss.mean()) for share, loss in zip(shares, losses, strict=True)]
    return {
        "token-mean": mean_of_tokens(losses),
        "seq-mean-token-sum": sum(sums) / total,
        "seq-mean-token-mean": sum(means) / total,
        "seq-mean-token-sum-norm": sum(sums) / total / horizon,
    }[mode]


def divergence(kind: str, current: Floats, reference: Floats, behaviour: Floats) -> Floats:
    """John Schulman's estimators, by verl's names."""
    d = reference - current
    k3: Floats = np.exp(d) - 1 - d
    formulas: Mapping[str, Floats] = {
        "k1": -d,
        "k2": d**2 / 2,
        "k3": k3,
        "low_var_kl": np.clip(k3, -10, 10),
        "abs": np.abs(d),
        "corrected_k3": np.clip(np.exp(current - behaviour), 0, 2) * k3,
    }
    return formulas[kind]


def grpo(rewards: Sequence[float], floor: float | None) -> Floats:
    """Return the advantages of one group, scaled by the unbiased deviation plus 1e-6."""
    r = np.array(rewards, float)
    scale = 1.0 if floor is None else max(r.std(ddof=1), floor) + 1e-6
    advantages: Floats = (r - r.mean()) / scale
    return advantages


def rloo(rewards: Sequence[float]) -> Floats:
    r = np.array(rewards, float)
    advantages: Floats = len(r) / (len(r) - 1) * (r - r.mean())
    return advantages


def opmd_advantages(rewards: Sequence[float], tau: float | None) -> Floats:
    r = np.array(rewards, float)
    advantages: Floats = r - (r.mean() if tau is None else tau * np.log(np.exp(r / tau).mean()))
    return advantages


def step_wise(
    rewards: Sequence[float], turns: Sequence[Sequence[float | None]], *, norm: bool, weight: float, decay: float
) -> list[Floats]:
    """Return the advantage of each turn in one group whose runs are one branch each."""
    runs = grpo(rewards, 0.01)
    stated = np.array([value for values in turns for value in values if value is not None], float)
    mean, scale = (stated.mean(), max(stated.std(ddof=1), 0.01) + 1e-6) if len(stated) > 1 else (0.0, np.inf)
    advantages = []
    for advantage, values in zip(runs, turns, strict=True):
        scaled = np.array([0.0 if value is None else (value - mean) / scale for value in values])
        credit = [sum(decay ** (j - k) * scaled[j] for j in range(k, len(scaled))) for k in range(len(scaled))]
        advantages.append(advantage / (len(values) if norm else 1) + weight * np.array(credit))
    return advantages


def gae(values: Floats, reward: float, gamma: float, lam: float) -> Floats:
    """Equation 16 of the paper: the sum of all later differences, written out."""
    rewards = np.zeros(len(values))
    rewards[-1] = reward
    following = np.append(values[1:], 0.0)
    delta = rewards + gamma * following - values
    return np.array(
        [sum((gamma * lam) ** (j - t) * delta[j] for j in range(t, len(values))) for t in range(len(values))]
    )
