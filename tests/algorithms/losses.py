"""Our losses on rows of a batch and our advantages, and how far they are from the oracle's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from headrace_runtime.settings.sections import complete
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.estimators import AdvantageInputs
from headrace_trainer.algorithms.loss import DIVERGENCES
from headrace_trainer.algorithms.losses import LossInputs
from headrace_trainer.algorithms.settings import AdvantageSettings, LossSettings
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.torch_learner import token_advantages
from headrace_trainer.torch_learner.model import forward
from tests.algorithms import oracle
from tests.algorithms.oracle import FORMULAS, Floats, SequenceTerms, aggregated, divergence

Settings = complete(LossSettings)
STEP = 1e-5
"""Step of the differences that approximate a derivative."""
PROMPT, GAP = 3, 2
Advantages = complete(AdvantageSettings)
DECAY = Decay(task=0.9, model=0.99, tasks_max=100)


@dataclass(frozen=True)
class Case:
    """One loss with its settings; `parameters` are those that the oracle's formula has."""

    kind: str
    parameters: Mapping[str, Any]
    settings: Mapping[str, Any] = field(default_factory=dict)
    agg_mode: str = "token-mean"
    shape: str = "plain"

    @property
    def loss(self) -> LossSettings:
        loss_settings: LossSettings = Settings.model_validate(
            {"kind": self.kind, "agg_mode": self.agg_mode, **self.settings}
        )
        return loss_settings

    def __str__(self) -> str:
        return f"{self.kind} {dict(self.parameters)}"


PPO = {"clip_low": 0.2, "clip_high": 0.28, "weight_max": 2.0}
CASES = (
    Case("likelihood", {}),
    Case("clipped", PPO),
    Case("clipped", {**PPO, "clip_high": 0.2, "clip_dual": 3.0}, {"clip_high": 0.2, "clip_dual": 3.0}),
    Case("cispo", {"clip_low": 1.0, "clip_high": 0.28}),
    Case("cispo", {"clip_low": 0.3, "clip_high": 0.1}, {"cispo": {"clip_low": 0.3, "clip_high": 0.1}}),
    Case("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}, agg_mode="seq-mean-token-mean"),
    Case(
        "gspo",
        {"clip_low": 0.4, "clip_high": 0.6},
        {"gspo": {"clip_low": 0.4, "clip_high": 0.6}},
        agg_mode="seq-mean-token-mean",
    ),
    Case("opmd", {"tau": 1.0}),
    Case("opmd", {"tau": 0.25}, {"opmd": {"tau": 0.25}}),
    Case("dpo", {"beta": 0.1, "label_smoothing": 0.0}, agg_mode="seq-mean-token-sum", shape="pairs"),
    Case(
        "dpo",
        {"beta": 0.7, "label_smoothing": 0.2},
        {"dpo": {"beta": 0.7, "label_smoothing": 0.2}},
        agg_mode="seq-mean-token-sum",
        shape="pairs",
    ),
    Case(
        "kto",
        {"beta": 0.1, "good_weight": 1.0, "bad_weight": 1.0, "reference_point": 0.0},
        agg_mode="seq-mean-token-sum",
        shape="labels",
    ),
    Case(
        "kto",
        {"beta": 0.5, "good_weight": 1.5, "bad_weight": 0.5, "reference_point": 0.3},
        {"kto": {"beta": 0.5, "good_weight": 1.5, "bad_weight": 0.5, "reference_point": 0.3}},
        agg_mode="seq-mean-token-sum",
        shape="labels",
    ),
    Case("mix", {**PPO, "mu": 0.1}, agg_mode="token-mean-by-origin", shape="mixed"),
    Case("mix", {**PPO, "mu": 0.6}, {"mix": {"mu": 0.6}}, agg_mode="token-mean-by-origin", shape="mixed"),
)


def draw(shape: str, seed: int) -> list[SequenceTerms]:
    """Six sequences of one to seven loss tokens."""
    generator = np.random.default_rng(seed)
    sequences = []
    for number in range(6):
        count = int(generator.integers(1, 8))
        behaviour, start, current, reference = (generator.normal(-2, 0.5, count) for _ in range(4))
        start, current = behaviour + 0.4 * (start + 2), behaviour + 0.4 * (current + 2)
        sign = 1.0 if number % 2 == 0 else -1.0
        sequence = SequenceTerms(current, start, behaviour, reference, float(generator.normal()))
        if shape == "pairs":
            sequence = replace(sequence, advantage=sign, pair=f"pair {number // 2}")
        elif shape == "labels":
            sequence = replace(sequence, advantage=sign)
        elif shape == "mixed" and number % 3 == 0:
            sequence = replace(sequence, advantage=1.0, written=True, behaviour=np.zeros(count))
        sequences.append(sequence)
    if shape == "pairs":  # answers of a pair need not stand beside each other
        sequences = [sequences[position] for position in (0, 3, 2, 1, 5, 4)]
    return sequences


def rows_of(sequences: Sequence[SequenceTerms]) -> list[Row]:
    """Each as a row with a prompt, and with an observation in the middle of its loss tokens."""
    return [_row(number, sequence) for number, sequence in enumerate(sequences)]


def loss_and_gradient(
    case: Case, sequences: Sequence[SequenceTerms], rows: Sequence[Row] | None = None
) -> tuple[float, Floats]:
    """The loss, and its gradient by the logprob of each loss token."""
    settings = case.loss
    batch = Batch(tuple(rows_of(sequences) if rows is None else rows), None, case.agg_mode, settings.horizon_tokens)
    pack = forward.collate([batch.with_token_weight(row) for row in batch.rows], torch.device("cpu"), padded=False)
    current_N, start_N, reference_N = (
        torch.tensor(np.concatenate([getattr(sequence, name) for sequence in sequences]))
        for name in ("current", "start", "reference")
    )
    current_N.requires_grad_()
    sampled = LossInputs(
        current_N,
        start_N,
        pack.behaviour_N.double(),
        pack.advantage_N.double(),
        pack.row_N,
        None,
        reference_N,
        pack.written_N,
        pack.pair_R,
    )
    tokens = settings.function.load()(sampled, settings)
    loss = (tokens.loss_N * pack.weight_N.double()).sum()
    loss.backward()  # type: ignore[no-untyped-call]
    assert current_N.grad is not None
    return loss.item(), current_N.grad.numpy()


def off_value(case: Case, seed: int) -> float:
    """How far our loss is from the oracle's."""
    sequences = draw(case.shape, seed)
    expected = FORMULAS[case.kind](sequences, [sequence.current for sequence in sequences], case.parameters)
    return abs(loss_and_gradient(case, sequences)[0] - expected)


def off_gradient(case: Case, seed: int) -> float:
    """How far our gradient is from the oracle's, by central differences; the largest of all tokens."""
    sequences = draw(case.shape, seed)
    frozen = [sequence.current for sequence in sequences]

    def moved(position: tuple[int, int], by: float) -> float:
        changed = list(sequences)
        current = sequences[position[0]].current.copy()
        current[position[1]] += by
        changed[position[0]] = replace(sequences[position[0]], current=current)
        return FORMULAS[case.kind](changed, frozen, case.parameters)

    positions = [(row, token) for row, sequence in enumerate(sequences) for token in range(len(sequence.current))]
    expected = np.array([(moved(position, STEP) - moved(position, -STEP)) / (2 * STEP) for position in positions])
    return float(np.abs(loss_and_gradient(case, sequences)[1] - expected).max())


AGG_MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def off_agg_mode(mode: str, seed: int) -> float:
    """Return the error of the plain loss with branches that are parts of runs."""
    sequences = [
        replace(sequence, share=(1.0, 0.5, 0.25)[number % 3]) for number, sequence in enumerate(draw("plain", seed))
    ]
    losses = [-sequence.advantage * sequence.current for sequence in sequences]
    expected = aggregated(losses, [sequence.share for sequence in sequences], mode, 1024)
    return abs(loss_and_gradient(Case("likelihood", {}, agg_mode=mode), sequences)[0] - expected)


def off_divergence(kind: str, seed: int) -> float:
    """Return the error of a token's divergence from the base."""
    generator = np.random.default_rng(seed)
    current, reference, behaviour = (generator.normal(-2, 2, 50) for _ in range(3))
    divergences = DIVERGENCES[kind](torch.tensor(current), torch.tensor(reference), torch.tensor(behaviour)).numpy()
    return float(np.abs(divergences - divergence(kind, current, reference, behaviour)).max())


def _row(number: int, sequence: SequenceTerms) -> Row:
    count = len(sequence.current)
    length = PROMPT + count + GAP
    mask = np.zeros(length, np.bool_)
    mask[PROMPT] = True
    mask[PROMPT + 1 + GAP : length] = True
    behaviour = np.zeros(length, np.float32)
    behaviour[mask] = sequence.behaviour
    return Row(
        experience_id=f"e{number}",
        revision=0,
        token_ids_T=np.arange(length, dtype=np.int32),
        loss_mask_T=mask,
        behaviour_T=behaviour,
        temperature_T=np.ones(length, np.float32),
        advantage=np.float32(sequence.advantage),
        fresh_T=np.zeros(length, np.bool_),
        together=sequence.pair,
        written=sequence.written,
        share=sequence.share,
    )


def group_difference(kind: str, seed: int, **settings: Any) -> float:
    """Three groups of two to six runs, in mixed order."""
    generator = np.random.default_rng(seed)
    rewards = [list(generator.normal(0, 1, int(generator.integers(2, 7)))) for _ in range(3)]
    positions = [(group, run) for group, several in enumerate(rewards) for run in range(len(several))]
    generator.shuffle(positions)
    batch = _batch(positions, rewards, [() for _ in positions])
    chosen = Advantages.model_validate({"kind": kind, **settings})
    advantages, _ = chosen.estimator.compute(batch, Baselines(), DECAY, chosen)
    expected = [_group(kind, several, chosen) for several in rewards]
    pairs = zip(advantages.values_B, positions, strict=True)
    return float(max(abs(value - expected[group][run]) for value, (group, run) in pairs))


def turn_difference(seed: int, *, norm: bool = False, weight: float = 1.0, decay: float = 1.0) -> float:
    """One group of four runs with one to five turns, of which some have no reward."""
    generator = np.random.default_rng(seed)
    rewards = list(generator.normal(0, 1, 4))
    turns = [
        [None if generator.random() < 0.3 else float(generator.normal()) for _ in range(int(generator.integers(1, 6)))]
        for _ in rewards
    ]
    turn_settings = {"step_norm": norm, "turn_weight": weight, "turn_decay": decay}
    chosen = Advantages.model_validate({"kind": "step_wise_grpo", "step_wise_grpo": turn_settings})
    batch = _batch([(0, run) for run in range(4)], [rewards], turns)
    advantages, _ = chosen.estimator.compute(batch, Baselines(), DECAY, chosen)
    credit = chosen.estimator.credit
    assert credit is not None
    computed = [
        credit(
            advantages.values_B[run],
            turns[run],
            advantages.turn_baselines_B[run],
            advantages.turn_scales_B[run],
            chosen,
        )
        for run in range(4)
    ]
    expected = oracle.step_wise(rewards, turns, norm=norm, weight=weight, decay=decay)
    return max(
        float(np.abs(np.array(values) - expected_values).max())
        for values, expected_values in zip(computed, expected, strict=True)
    )


def critic_difference(seed: int, gamma: float, lam: float) -> float:
    """Compare GAE with the sum that it stands for."""
    generator = np.random.default_rng(seed)
    values, reward = generator.normal(0, 1, 12), float(generator.normal())
    advantages, returns = token_advantages.gae(values, reward, gamma, lam)
    expected = oracle.gae(values, reward, gamma, lam)
    return float(max(np.abs(advantages - expected).max(), np.abs(returns - expected - values).max()))


def revision_difference(seed: int, gamma: float, lam: float) -> float:
    """Check that a correction adds the difference of the two advantages, independent of the critic."""
    generator = np.random.default_rng(seed)
    values, old, new = generator.normal(0, 1, 9), 0.25, -1.5
    difference = oracle.gae(values, new, gamma, lam) - oracle.gae(values, old, gamma, lam)
    return float(np.abs(token_advantages.reward_weights(9, gamma, lam) * (new - old) - difference).max())


def _group(kind: str, rewards: Sequence[float], settings: AdvantageSettings) -> oracle.Floats:
    if kind == "rloo":
        return oracle.rloo(rewards)
    if kind == "opmd":
        opmd_settings = settings.of("opmd").model_dump()
        return oracle.opmd_advantages(
            rewards, opmd_settings["tau"] if opmd_settings["baseline"] == "logavgexp" else None
        )
    return oracle.grpo(rewards, settings.scale_min if settings.scale == "std" else None)


def _batch(
    positions: Sequence[tuple[int, int]], rewards: Sequence[Sequence[float]], turns: Sequence[Sequence[float | None]]
) -> AdvantageInputs:
    return AdvantageInputs(
        [rewards[group][run] for group, run in positions],
        [1.0] * len(positions),
        [f"{group}/{run}" for group, run in positions],
        [f"task {group}" for group, _ in positions],
        turns,
    )
