"""Our losses on rows of a batch, through collating and weights, and how far they are from the oracle's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from headrace_runtime.settings.sections import complete
from headrace_trainer.algorithms.loss import DIVERGENCES
from headrace_trainer.algorithms.losses import LossInputs
from headrace_trainer.algorithms.settings import LossSettings
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.torch_learner.model import forward
from tests.algorithms.oracle import FORMULAS, Floats, SequenceTerms, aggregated, divergence

Settings = complete(LossSettings)
STEP = 1e-5
"""Step of the differences that approximate a derivative."""
PROMPT, GAP = 3, 2


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
    pack = forward.collate([batch.weighted(row) for row in batch.rows], torch.device("cpu"), padded=False)
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
