"""One step on a batch: forward and backward pass by pass, then one update of the weights (or several).

The loss is a sum over tokens, each with the weight of its row. Passes add their parts of that one sum, so cutting the
batch into passes changes nothing but rounding. Rows that are trained for the first time share the batch's
weight (`Batch.token_weight`), what is learned about the size of gradients, and the clip of the global norm. Corrections
come with the weight that their tokens had then: gradients of both only meet after that.

A device computes ahead of the program that tells it what to do, until a number is asked for. That happens once an
update, before the weights move: the norm of the gradients, the size that is learned from them, and all measurements.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace_runtime import liveness
from headrace_trainer.algorithms.divergences import DIVERGENCES
from headrace_trainer.algorithms.loss import TokenLoss, k3, left_out
from headrace_trainer.algorithms.losses import Compute, LossInputs
from headrace_trainer.algorithms.settings import LossSettings
from headrace_trainer.batches.batch import Batch, passes
from headrace_trainer.learner import GRADIENT_FACTOR, Abandoned, NotFinite, StepResult
from headrace_trainer.torch_learner.appraisal import Appraiser
from headrace_trainer.torch_learner.measures import Measures
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.torch_learner.shards import whole
from headrace_trainer.torch_learner.team import ALONE, IDLE, Team


def train(
    policy: Policy,
    optimizer: Optimizer,
    batch: Batch,
    settings: LossSettings,
    pack_tokens: int,
    stop: threading.Event,
    *,
    from_base: bool = False,
    appraiser: Appraiser | None = None,
    team: Team = ALONE,
) -> StepResult:
    """Change the weights by `batch`. `from_base`: measure the divergence from the base also where it has no part in
    the loss. `appraiser`: makes the advantages of tokens from those of rows. `team`: who makes the passes; it is told
    the same as every other member. Blocks; runs in the training thread.

    Raises `Abandoned` when `stop` is set (looked at between passes) and `NotFinite`.
    """
    began = time.perf_counter()
    first, corrections = _packs(policy, batch, pack_tokens, team)
    if appraiser is not None:
        first, corrections = appraiser.appraise(policy, first, corrections, stop)
    packs = [*corrections, *first]
    starts = _at_start(policy, packs, stop) if settings.updates_per_step > 1 else [None] * len(packs)
    bases = [policy.reference_logprobs(one) if settings.kl or from_base else None for one in first]
    measures, token_weight, moved = Measures(), batch.token_weight, False
    for update in range(settings.updates_per_step):
        optimizer.zero_grad()
        for one, start_N in zip(corrections, starts, strict=False):
            _backward(policy, one, start_N, None, settings, measures, stop, correction=True)
        team.add_up(policy.parameters)
        stashed = optimizer.stash() if batch.corrections else {}
        for one, start_N, base_N in zip(first, starts[len(corrections) :], bases, strict=True):
            _backward(policy, one, start_N, base_N, settings, measures, stop)
        team.add_up(policy.parameters)
        learning_rate, last = optimizer.learning_rate, update + 1 == settings.updates_per_step
        measures = team.together(measures) if last else measures
        norm, numbers = optimizer.take(batch.first_weight, measures.numbers() if last else None)
        if norm is None and update == 0:
            raise NotFinite
        if norm is None:
            measures = measures if last else team.together(measures)
            numbers = numbers or measures.numbers().tolist()
            break  # what the updates before it did stands
        if update == 0:
            token_weight *= optimizer.gain
        if norm > 0.0 or any(bool(whole(gradient).any()) for gradient in stashed.values()):
            optimizer.apply(batch.weight, stashed)
            policy.renew()
            moved = True
    found, left_out = measures.values(batch, numbers)
    appraised = appraiser.learn() if appraiser is not None else {}
    seconds = time.perf_counter() - began
    measured = found | {
        "gradient_norm": norm or 0.0,
        "learning_rate": learning_rate,
        GRADIENT_FACTOR: token_weight,
        "step_seconds": seconds,
        "tokens_per_second": sum(row.length for row in batch.rows) / seconds,
    }
    if appraiser is not None:
        measured |= appraiser.measured
    return StepResult(measured, left_out, measures.slopes_by_row(), appraised, moved)


def _packs(policy: Policy, batch: Batch, pack_tokens: int, team: Team) -> tuple[list[Pack], list[Pack]]:
    """Rows that are trained for the first time, and corrections; each pass holds one kind. Those that are ours."""
    found = []
    for rows in (batch.first, batch.corrections):
        lengths = [row.length for row in rows]
        indices = team.mine(passes(rows, team.budget(lengths, pack_tokens)), lengths)
        found.append([policy.collate([batch.weighted(rows[i]) for i in chosen] or [IDLE]) for chosen in indices])
    return found[0], found[1]


def _backward(
    policy: Policy,
    one: Pack,
    start_N: Tensor | None,
    base_N: Tensor | None,
    settings: LossSettings,
    measures: Measures,
    stop: threading.Event,
    *,
    correction: bool = False,
) -> None:
    """Add this pass's share of the gradient."""
    liveness.progress()
    if stop.is_set():
        raise Abandoned
    function = settings.function
    reference_N = policy.reference_logprobs(one) if function.needs.reference and base_N is None else base_N
    linear = function.correction if correction else None
    compute, by_token = (linear or function.load)(), function.by_token or linear is not None
    share = _Share(one, compute, settings, reference_N, start_N, kl=0.0 if base_N is None else settings.kl)
    if not by_token or (settings.sequence_mask_max and start_N is None):
        # The loss of a token, or which sequences are left out, is known after a sequence's last token.
        current_N, entropy_N = policy.logprobs(one)
        now_N = current_N.detach()
        share.start_N = now_N if start_N is None else start_N
        share.left_out_N = _left_out(one, share.start_N, settings, measures)
        torch.autograd.backward(current_N, share.slope(now_N, _ALL))
        if function.correction is not None and not correction and all(one is not other for other, _ in measures.slopes):
            measures.slopes.append((one, share.by_row(now_N)))
    else:
        share.left_out_N = None if start_N is None else _left_out(one, start_N, settings, measures)
        current_N, entropy_N = policy.backward(one, share.slope)
    if one.idle:
        return
    with torch.no_grad():
        tokens, loss_N = share.of(current_N, _ALL)
    if base_N is not None:
        measures.base.append(k3(current_N.detach(), base_N))
    measures.observe(one, current_N.detach() if start_N is None else start_N, entropy_N, tokens, loss_N)


_ALL = slice(None)


@dataclass
class _Share:
    """The loss of a pass's tokens, all or some of them."""

    one: Pack
    compute: Compute
    settings: LossSettings
    reference_N: Tensor | None
    start_N: Tensor | None
    """None: the weights have not moved since the step began."""
    kl: float
    left_out_N: Tensor | None = None

    def of(self, current_N: Tensor, part: slice) -> tuple[TokenLoss, Tensor]:
        """By these logprobs, of the tokens `part`."""
        one = self.one
        start_N, reference_N, left_out_N = (
            None if given is None else given[part] for given in (self.start_N, self.reference_N, self.left_out_N)
        )
        start_N = current_N.detach() if start_N is None else start_N
        behaviour_N, advantage_N, row_N = one.behaviour_N[part], one.advantage_N[part], one.row_N[part]
        written_N = None if one.written_N is None else one.written_N[part]
        sampled = LossInputs(
            current_N, start_N, behaviour_N, advantage_N, row_N, left_out_N, reference_N, written_N, one.pair_R
        )
        tokens = self.compute(sampled, self.settings)
        loss_N = tokens.loss_N
        if reference_N is not None and self.kl:
            divergence_N = DIVERGENCES[self.settings.kl_kind](current_N, reference_N, behaviour_N)
            kept_N = divergence_N if left_out_N is None else divergence_N.where(~left_out_N, 0.0)
            loss_N = loss_N + self.kl * kept_N
        return tokens, loss_N

    def slope(self, logprobs_N: Tensor, part: slice) -> Tensor:
        with torch.enable_grad():
            leaf_N = logprobs_N.detach().requires_grad_()
            _, loss_N = self.of(leaf_N, part)
            (slope_N,) = torch.autograd.grad((loss_N * self.one.weight_N[part]).sum(), leaf_N)
        return slope_N

    def by_row(self, logprobs_N: Tensor) -> Tensor:
        """What stands in the place of 1 in each row's policy gradient (`_R`), where the loss is not linear. It is the
        same for all tokens of a row."""
        one = self.one
        slope_N = replace(self, kl=0.0).slope(logprobs_N, _ALL)
        unit_N = -one.weight_N * one.advantage_N
        relative_N = torch.where(unit_N == 0, 0.0, slope_N / unit_N)
        counts_R = torch.bincount(one.row_N, minlength=len(one.names))
        starts_R = counts_R.cumsum(0) - counts_R
        return relative_N[starts_R]


def _left_out(one: Pack, start_N: Tensor, settings: LossSettings, measures: Measures) -> Tensor | None:
    """The tokens of sequences that have drifted too far from what they were sampled from."""
    if not settings.sequence_mask_max:
        return None
    behaviour_N = one.behaviour_N if one.written_N is None else torch.where(one.written_N, start_N, one.behaviour_N)
    left_out_R = left_out(start_N, behaviour_N, one.row_N, len(one.names), settings.sequence_mask_max)
    earlier_R = measures.left_out.get(one.names)
    measures.left_out[one.names] = left_out_R if earlier_R is None else earlier_R | left_out_R
    return left_out_R[one.row_N]


@torch.no_grad()
def _at_start(policy: Policy, packs: Sequence[Pack], stop: threading.Event) -> list[Tensor]:
    """Logprobs of the weights before the first of several updates."""
    found = []
    for one in packs:
        if stop.is_set():
            raise Abandoned
        found.append(policy.logprobs(one)[0])
    return found
