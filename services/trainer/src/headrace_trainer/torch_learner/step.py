"""One step on a batch: forward and backward pass by pass, possibly divided among processes, then one update of the
weights (or several).

The loss is a sum over tokens, each with the weight of its row. Each pass adds its part of that sum, so dividing the
batch into passes changes only the rounding. Rows that are trained for the first time share the batch's weight
(`Batch.token_weight`), the estimate of the size of gradients, and the clip of the global norm. Corrections have the
token weight of their first training: gradients of both are only combined after that.

A device computes asynchronously until a number is read from it. That happens once an update, before the weights move:
for the norm of the gradients, the estimate of their size, and all measurements.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from headrace_runtime.process import liveness
from headrace_trainer.algorithms.loss import DIVERGENCES, TokenLoss, drifted_rows, k3
from headrace_trainer.algorithms.losses import Compute, LossInputs
from headrace_trainer.algorithms.settings import LossSettings
from headrace_trainer.batches.batch import Batch, Row, split_into_passes
from headrace_trainer.learner import GRADIENT_FACTOR, Abandoned, NotFinite, StepResult
from headrace_trainer.torch_learner.measures import Measures
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.stored_tensors import gather
from headrace_trainer.torch_learner.token_advantages import TokenAdvantageEstimator

IDLE = Row(
    "",
    0,
    np.zeros(2, np.int32),
    np.array([False, True]),
    np.zeros(2, np.float32),
    np.ones(2, np.float32),
    np.float32(0),
    np.zeros(2, np.bool_),
)
"""A row without name and weight. A process without rows of its own computes it when the others compute a pass."""


class Team(Protocol):
    """Interface of a team of processes that share a step.

    Every member calls the same methods in order, with the same batch.
    """

    def budget(self, lengths: Sequence[int], pack_tokens: int) -> int:
        """Return the number of tokens per pass: at most `pack_tokens`, fewer if otherwise some members had no pass.

        `lengths` are the numbers of tokens of the rows.
        """

    def own_passes(self, packs: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        """Return the forward passes that this process computes, each as row numbers. An empty list is a pass over the
        dummy row `IDLE`, so that all processes take part.
        """

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Replace each gradient by the sum of all members' gradients."""

    def merge_measures(self, measures: Measures) -> Measures:
        """Return the measurements of all members combined, equal in each member."""


class SingleProcess:
    """Implementation of `Team` for training in one process, which computes all passes itself."""

    def budget(self, lengths: Sequence[int], pack_tokens: int) -> int:
        return pack_tokens

    def own_passes(self, packs: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        return packs

    def sum_gradients(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Do nothing, because there are no other members."""

    def merge_measures(self, measures: Measures) -> Measures:
        return measures


SINGLE_PROCESS = SingleProcess()


def train(
    policy: Policy,
    optimizer: Optimizer,
    batch: Batch,
    settings: LossSettings,
    pack_tokens: int,
    stop: threading.Event,
    *,
    from_base: bool = False,
    token_estimator: TokenAdvantageEstimator | None = None,
    team: Team = SINGLE_PROCESS,
) -> StepResult:
    """Take a training step: change the weights by `batch`. Blocks; runs in the training thread.

    Args:
        policy: the model.
        optimizer: its optimizer.
        batch: the rows to train.
        settings: settings of the loss.
        pack_tokens: number of tokens in one pass.
        stop: event that ends the step, checked between passes.
        from_base: whether to measure the divergence from the base even if the loss does not use it.
        token_estimator: estimator of an advantage for each token; None if all tokens of a row have the row's.
        team: processes that share the passes. Every member must get the same arguments.

    Raises:
        Abandoned: `stop` was set.
        NotFinite: the gradient is infinite or not a number.
    """
    began = time.perf_counter()
    first, corrections = _collate_passes(policy, batch, pack_tokens, team)
    if token_estimator is not None:
        first, corrections = token_estimator.estimate(policy, first, corrections, stop)
    packs = [*corrections, *first]
    starts = _start_logprobs(policy, packs, stop) if settings.updates_per_step > 1 else [None] * len(packs)
    bases = [policy.reference_logprobs(pack) if settings.kl or from_base else None for pack in first]
    measures, token_weight, moved = Measures(), batch.token_weight, False
    for update in range(settings.updates_per_step):
        optimizer.zero_grad()
        for pack, start_N in zip(corrections, starts, strict=False):
            _backward(policy, pack, start_N, None, settings, measures, stop, correction=True)
        team.sum_gradients(policy.parameters)
        stashed = optimizer.pop_gradients() if batch.corrections else {}
        for pack, start_N, base_N in zip(first, starts[len(corrections) :], bases, strict=True):
            _backward(policy, pack, start_N, base_N, settings, measures, stop)
        team.sum_gradients(policy.parameters)
        learning_rate, last = optimizer.learning_rate, update + 1 == settings.updates_per_step
        measures = team.merge_measures(measures) if last else measures
        norm, numbers = optimizer.clip_gradients(batch.first_weight, measures.numbers() if last else None)
        if norm is None and update == 0:
            raise NotFinite
        if norm is None:
            measures = measures if last else team.merge_measures(measures)
            numbers = numbers or measures.numbers().tolist()
            break  # the earlier updates of this step are kept
        if update == 0:
            token_weight *= optimizer.gain
        if norm > 0.0 or any(bool(gather(gradient).any()) for gradient in stashed.values()):
            optimizer.apply(batch.weight, stashed)
            policy.update_weights()
            moved = True
    values, left_out = measures.values(batch, numbers)
    estimated = token_estimator.learn() if token_estimator is not None else {}
    seconds = time.perf_counter() - began
    measured = values | {
        "gradient_norm": norm or 0.0,
        "learning_rate": learning_rate,
        GRADIENT_FACTOR: token_weight,
        "step_seconds": seconds,
        "tokens_per_second": sum(row.length for row in batch.rows) / seconds,
    }
    if token_estimator is not None:
        measured |= token_estimator.measured
    return StepResult(measured, left_out, measures.slopes_by_row(), estimated, moved)


def _collate_passes(policy: Policy, batch: Batch, pack_tokens: int, team: Team) -> tuple[list[Pack], list[Pack]]:
    """Collate this process's share of a batch into packs of at most `pack_tokens` tokens, one for each forward pass.

    Returns:
        The packs of rows that are trained for the first time, and those of rows that correct an earlier update.
    """
    kinds = []
    for rows in (batch.first_rows, batch.corrections):
        lengths = [row.length for row in rows]
        indices = team.own_passes(split_into_passes(rows, team.budget(lengths, pack_tokens)), lengths)
        kinds.append(
            [policy.collate([batch.with_token_weight(rows[i]) for i in chosen] or [IDLE]) for chosen in indices]
        )
    return kinds[0], kinds[1]


def _backward(
    policy: Policy,
    pack: Pack,
    start_N: Tensor | None,
    base_N: Tensor | None,
    settings: LossSettings,
    measures: Measures,
    stop: threading.Event,
    *,
    correction: bool = False,
) -> None:
    """Add the gradient of one pass to that of the parameters."""
    liveness.progress()
    if stop.is_set():
        raise Abandoned
    function = settings.function
    reference_N = policy.reference_logprobs(pack) if function.needs.reference and base_N is None else base_N
    linear = function.correction if correction else None
    compute, by_token = (linear or function.load)(), function.by_token or linear is not None
    share = _PassLoss(pack, compute, settings, reference_N, start_N, kl=0.0 if base_N is None else settings.kl)
    if not by_token or (settings.sequence_mask_max and start_N is None):
        # The loss of a token, or whether a sequence is left out, depends on all tokens of the sequence.
        current_N, entropy_N = policy.logprobs(pack)
        now_N = current_N.detach()
        share.start_N = now_N if start_N is None else start_N
        share.left_out_N = _left_out(pack, share.start_N, settings, measures)
        torch.autograd.backward(current_N, share.slope(now_N, _ALL))
        is_new = all(pack is not other for other, _ in measures.slopes)
        if function.correction is not None and not correction and is_new:
            measures.slopes.append((pack, share.by_row(now_N)))
    else:
        share.left_out_N = None if start_N is None else _left_out(pack, start_N, settings, measures)
        current_N, entropy_N = policy.backward(pack, share.slope)
    if pack.idle:
        return
    with torch.no_grad():
        tokens, loss_N = share.of(current_N, _ALL)
    if base_N is not None:
        measures.base.append(k3(current_N.detach(), base_N))
    measures.observe(pack, current_N.detach() if start_N is None else start_N, entropy_N, tokens, loss_N)


_ALL = slice(None)


@dataclass
class _PassLoss:
    """Loss of the tokens of one pass, or of some of them."""

    pack: Pack
    compute: Compute
    settings: LossSettings
    reference_N: Tensor | None
    start_N: Tensor | None
    """None where the weights have not moved since the step began."""
    kl: float
    left_out_N: Tensor | None = None

    def of(self, current_N: Tensor, part: slice) -> tuple[TokenLoss, Tensor]:
        """Return the loss of the tokens in the range `part`, whose present logprobs are `current_N`, and its sum."""
        pack = self.pack
        start_N, reference_N, left_out_N = (
            None if values_N is None else values_N[part]
            for values_N in (self.start_N, self.reference_N, self.left_out_N)
        )
        start_N = current_N.detach() if start_N is None else start_N
        behaviour_N, advantage_N, row_N = pack.behaviour_N[part], pack.advantage_N[part], pack.row_N[part]
        written_N = None if pack.written_N is None else pack.written_N[part]
        sampled = LossInputs(
            current_N, start_N, behaviour_N, advantage_N, row_N, left_out_N, reference_N, written_N, pack.pair_R
        )
        tokens = self.compute(sampled, self.settings)
        loss_N = tokens.loss_N
        if reference_N is not None and self.kl:
            divergence_N = DIVERGENCES[self.settings.kl_kind](current_N, reference_N, behaviour_N)
            trained_N = divergence_N if left_out_N is None else divergence_N.where(~left_out_N, 0.0)
            loss_N = loss_N + self.kl * trained_N
        return tokens, loss_N

    def slope(self, logprobs_N: Tensor, part: slice) -> Tensor:
        with torch.enable_grad():
            leaf_N = logprobs_N.detach().requires_grad_()
            _, loss_N = self.of(leaf_N, part)
            (slope_N,) = torch.autograd.grad((loss_N * self.pack.weight_N[part]).sum(), leaf_N)
        return slope_N

    def by_row(self, logprobs_N: Tensor) -> Tensor:
        """Return for each row (`_R`) the factor of its gradient relative to `advantage * gradient of logprob`.

        It is 1 unless the loss is not linear in the advantage, and equal for all tokens of a row.
        """
        pack = self.pack
        slope_N = replace(self, kl=0.0).slope(logprobs_N, _ALL)
        unit_N = -pack.weight_N * pack.advantage_N
        relative_N = torch.where(unit_N == 0, 0.0, slope_N / unit_N)
        counts_R = torch.bincount(pack.row_N, minlength=len(pack.names))
        starts_R = counts_R.cumsum(0) - counts_R
        return relative_N[starts_R]


def _left_out(pack: Pack, start_N: Tensor, settings: LossSettings, measures: Measures) -> Tensor | None:
    """Return the tokens of sequences that have drifted too far from their sampling policy."""
    if not settings.sequence_mask_max:
        return None
    behaviour_N = pack.behaviour_N if pack.written_N is None else torch.where(pack.written_N, start_N, pack.behaviour_N)
    left_out_R = drifted_rows(start_N, behaviour_N, pack.row_N, len(pack.names), settings.sequence_mask_max)
    earlier_R = measures.left_out.get(pack.names)
    measures.left_out[pack.names] = left_out_R if earlier_R is None else earlier_R | left_out_R
    return left_out_R[pack.row_N]


@torch.no_grad()
def _start_logprobs(policy: Policy, packs: Sequence[Pack], stop: threading.Event) -> list[Tensor]:
    """Return the logprobs of each pass before the first of several updates on the batch."""
    logprobs = []
    for pack in packs:
        if stop.is_set():
            raise Abandoned
        logprobs.append(policy.logprobs(pack)[0])
    return logprobs
