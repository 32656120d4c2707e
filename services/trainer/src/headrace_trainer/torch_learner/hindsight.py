"""A teacher that sees the user's next message: the base model, prompted with the reply to a contradicted answer
(`headrace_trainer.algorithms.catalog.hindsight`, which has the formulas).

No random number is drawn that the earlier runs do not determine. The measurements and the guard set are saved with the
optimizer's state.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headrace_runtime.errors import SettingError
from headrace_statistics import intervals
from headrace_trainer.algorithms.catalog.hindsight import (
    BLOCK,
    GUARD_ANSWERS_MAX,
    GapEstimate,
    HindsightSettings,
    ReplyBlock,
    refusal,
)
from headrace_trainer.batches.batch import Hindsight, Row, split_into_passes
from headrace_trainer.learner import Abandoned, StepRefused
from headrace_trainer.torch_learner.model.distillation import DistillationTarget
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.policy import Policy

Floats = NDArray[np.float64]
_GAP = "gap/dealt"
_TOKENS, _SHAPES = "guard/tokens", "guard/shapes"
"""The guard set: its tokens in one tensor, and the length, start and temperature of each answer."""


class HindsightTeacher:
    """`TokenAdvantageEstimator` of the algorithm `hindsight`. It needs a policy that keeps the base model in memory
    (`Policy.keep_reference`).
    """

    def __init__(self, settings: HindsightSettings, pack_tokens: int) -> None:
        self._settings = settings
        self._pack_tokens = pack_tokens
        self._policy: Policy | None = None
        self._stop = threading.Event()
        self._measured: dict[str, float] = {}
        self._reset()

    def _reset(self) -> None:
        self.gap = GapEstimate()
        self.guard: deque[Row] = deque(maxlen=GUARD_ANSWERS_MAX)

    @property
    def measured(self) -> Mapping[str, float]:
        return self._measured

    def estimate(
        self, policy: Policy, first: Sequence[Pack], corrections: Sequence[Pack], stop: threading.Event
    ) -> tuple[list[Pack], list[Pack]]:
        """Return the forward passes with the advantages of their tokens set.

        If the step is refused, the measurements of its rows are discarded, because their next batch measures them
        again.

        Raises:
            StepRefused: the gap between teacher and student is not significantly positive.
        """
        self._policy, self._stop, self._measured = policy, stop, {}
        rows = [row for pack in first for row in pack.rows]
        contradicted = sorted((row for row in rows if row.hindsight is not None), key=lambda row: row.name)
        if contradicted:
            gap = self.gap.plus(self.blocks(contradicted))
            if (decision := refusal(gap, self._settings)) is not None:
                raise StepRefused("hindsight_gap", gap.mean, decision.why, undecided=decision.undecided)
            self.gap = gap
            self._measured = {
                "hindsight_gap": gap.mean,
                "hindsight_gap_chance": gap.p_value,
                "hindsight_runs": float(gap.count),
            }
        self.guard.extend(sorted((row for row in rows if row.hindsight is None), key=lambda row: row.name))
        if self._settings.compared == "distributions":
            return self._with_targets(first), self._with_targets(corrections)
        return [self._with_advantages(pack) for pack in first], [self._with_advantages(pack) for pack in corrections]

    def learn(self) -> Mapping[str, float]:
        """Measure after a step how far the logprobs of the guard set have dropped below the base's. Train nothing."""
        guard = list(self.guard)
        if len(guard) > 1:
            before, after = self._base_logprobs(guard), self._logprobs(guard, reference=False)
            drops = [float((base - present).mean()) for base, present in zip(before, after, strict=True)]
            self._measured |= {"guard_drop_mean": fmean(drops), "guard_drop": intervals.lower_bound(drops, 0.025)}
        return {}

    def blocks(self, rows: Sequence[Row]) -> list[ReplyBlock]:
        """Measure the base's logprobs of the answer after the first contradicting reply of each run.

        Each answer is measured after its own reply, after those of the other runs of its block, and without a reply.
        The result is empty if there is only one run.
        """
        first: dict[str, Row] = {}
        for row in rows:
            first.setdefault(row.experience_id, row)
        runs = _comparable([*first.values()], self._pack_tokens)
        if len(runs) < 2:
            return []
        parts = [[runs[n] for n in part] for part in np.array_split(np.arange(len(runs)), -(-len(runs) // BLOCK))]
        contexts = [
            (row, context)
            for part in parts
            for row in part
            for context in (*(_prompt_with_reply(row, other) for other in part), _prompt_without_reply(row))
        ]
        logprobs = iter(self._base_logprobs([_answer_after(_hindsight_of(row), context) for row, context in contexts]))
        means = [np.array([[float(next(logprobs).mean()) for _ in (*part, None)] for _ in part]) for part in parts]
        return [ReplyBlock(means_BC[:, :-1], means_BC[:, -1]) for means_BC in means]

    def _with_advantages(self, pack: Pack) -> Pack:
        """Return the forward pass with the advantages of its tokens set: those that the teacher computes for
        contradicted answers, times the sign of their row, and 0 for accepted answers.
        """
        contradicted = [row for row in pack.rows if row.hindsight is not None]
        teacher = iter(self._base_logprobs([_teacher_row(row) for row in contradicted]))
        settings, advantages = self._settings, []
        for row in pack.rows:
            if row.hindsight is None:
                advantages.append(np.zeros(row.tokens))
                continue
            gap_N = next(teacher) - row.behaviour_T[row.loss_mask_T]
            advantages.append(float(row.advantage) * settings.coefficient * gap_N.clip(-settings.limit, settings.limit))
        return replace(pack, advantage_N=torch.from_numpy(np.concatenate(advantages)).to(pack.advantage_N))

    def _with_targets(self, packs: Sequence[Pack]) -> list[Pack]:
        """Return the forward passes with the teacher's distribution over the vocabulary as target.

        The teacher is the base. Its prompt contains the reply for contradicted answers, and no reply for accepted ones.
        Further passes train the model's answers to the replies at the positions of the answers that they are about.

        Raises:
            SettingError: the output head cannot compute logits chunk by chunk.
        """
        assert self._policy is not None
        policy = self._policy
        if not (policy.head.plain and policy.reference_head.plain):
            remedy = 'the output head of this model is not one matrix, or has an adapter; set "tokens"'
            raise SettingError("trainer.advantage.hindsight.compared", self._settings.compared, remedy)
        passes_with_targets = []
        for pack in packs:
            teachers = [row if row.hindsight is None else _teacher_row(row) for row in pack.rows]
            passes_with_targets.append(
                self._with_target(pack, teachers, [_sign(row) * row.token_weight for row in pack.rows])
            )
        contradicted = [row for pack in packs for row in pack.rows if row.hindsight is not None]
        answers = [
            _answer_after(_hindsight_of(row), context)
            for row, context in zip(contradicted, self._insertion_prompts(contradicted), strict=True)
        ]
        for indices in split_into_passes(answers, self._pack_tokens):
            pack = policy.collate([answers[index] for index in indices])
            teachers = [
                _answer_after(_hindsight_of(contradicted[index]), _prompt_with_reply(contradicted[index]))
                for index in indices
            ]
            weights = [_sign(contradicted[index]) * contradicted[index].token_weight for index in indices]
            passes_with_targets.append(self._with_target(pack, teachers, weights))
        return passes_with_targets

    def _insertion_prompts(self, rows: Sequence[Row]) -> list[NDArray[np.int32]]:
        """Return for each contradicted answer the prompt of the answer that the user's reply is probably about.

        That is this answer or an earlier one. Of their prompts, the result is the one after which the model's answer to
        the reply has the highest mean logprob under the base, without the reply.
        """
        candidates = [
            [*(row.token_ids_T[:start] for start in _hindsight_of(row).earlier_K), _prompt_without_reply(row)]
            for row in rows
        ]
        unclear = [
            (row, prompt)
            for row, prompts in zip(rows, candidates, strict=True)
            for prompt in prompts
            if len(prompts) > 1
        ]
        logprobs = self._base_logprobs([_answer_after(_hindsight_of(row), prompt) for row, prompt in unclear])
        means = iter([answer.mean() for answer in logprobs])
        return [max(prompts, key=lambda _: next(means)) if len(prompts) > 1 else prompts[0] for prompts in candidates]

    def _with_target(self, pack: Pack, teachers: Sequence[Row], weights: Sequence[float]) -> Pack:
        """Return a forward pass whose loss is the distance from the teacher's distribution (distillation).

        Args:
            pack: the forward pass to train.
            teachers: for each row of the pass, the same answer after the teacher's prompt.
            weights: weight of each row's tokens. It is negative for the reversal of an earlier training.
        """
        assert self._policy is not None
        weight_N = torch.tensor(weights).to(pack.weight_N)[pack.row_N]
        (positions_M,) = weight_N.nonzero(as_tuple=True)
        hidden_MH = torch.cat(self._hidden(teachers))[positions_M]
        weight_M = self._settings.coefficient * weight_N[positions_M]
        answer, limit = self._policy.reference_head.answer, self._settings.limit
        target = DistillationTarget(positions_M, hidden_MH, weight_M, answer, limit)
        return replace(pack, advantage_N=torch.zeros_like(pack.advantage_N), distillation=target)

    def _hidden(self, rows: Sequence[Row]) -> list[Tensor]:
        """Return the base's last hidden states before the loss tokens of each row. Raises `Abandoned`."""
        assert self._policy is not None
        return self._compute_per_row(rows, self._policy.reference_hidden)

    def _base_logprobs(self, rows: Sequence[Row]) -> list[Floats]:
        return self._logprobs(rows, reference=True)

    def _logprobs(self, rows: Sequence[Row], *, reference: bool) -> list[Floats]:
        """Compute the logprobs of the loss tokens of each row.

        Args:
            reference: whether to use the base model instead of the present weights.

        Raises:
            Abandoned: the step was stopped.
        """
        assert self._policy is not None
        policy = self._policy
        compute = policy.reference_logprobs if reference else lambda pack: policy.logprobs(pack)[0]
        return [each.double().cpu().numpy() for each in self._compute_per_row(rows, compute)]

    @torch.no_grad()
    def _compute_per_row(self, rows: Sequence[Row], compute: Callable[[Pack], Tensor]) -> list[Tensor]:
        """Return the part of each row in the results of `compute`, which has one entry per loss token of a pass."""
        assert self._policy is not None
        parts: dict[int, Tensor] = {}
        for indices in split_into_passes(rows, self._pack_tokens):
            if self._stop.is_set():
                raise Abandoned
            values = compute(self._policy.collate([rows[index] for index in indices]))
            parts |= zip(indices, torch.split(values, [rows[index].tokens for index in indices]), strict=True)
        return [parts[index] for index in range(len(rows))]

    def state(self) -> dict[str, Tensor]:
        sums = (self.gap.count, self.gap.total, self.gap.observed, *self.gap.permuted)
        tensors = {_GAP: torch.tensor(sums, dtype=torch.float64)}
        if self.guard:
            tensors[_TOKENS] = torch.from_numpy(np.concatenate([row.token_ids_T for row in self.guard]))
            shapes = [(row.length, row.length - row.tokens, float(row.temperature_T[-1])) for row in self.guard]
            tensors[_SHAPES] = torch.tensor(shapes, dtype=torch.float64)
        return tensors

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._reset()
        if _GAP in state:
            count, total, observed, *permuted = state[_GAP].tolist()
            self.gap = GapEstimate(int(count), total, observed, tuple(permuted))
        begin = 0
        for length, start, temperature in state[_SHAPES].tolist() if _SHAPES in state else ():
            tokens_T = state[_TOKENS][begin : begin + int(length)].numpy().astype(np.int32)
            self.guard.append(_scored_row(tokens_T, int(start), temperature))
            begin += int(length)


def _hindsight_of(row: Row) -> Hindsight:
    assert row.hindsight is not None
    return row.hindsight


def _sign(row: Row) -> float:
    """Return the factor of a row's loss: the row's advantage for a contradicted answer, otherwise 1.

    For the correction of an accepted answer, which is not trained, it is 0.
    """
    return float(not row.correction if row.hindsight is None else row.advantage)


def _comparable(rows: Sequence[Row], pack_tokens: int) -> list[Row]:
    """Return the rows whose replies may be permuted, without the longest rows.

    With every reply of another row, each sequence must fit into a pass and be no longer than the longest row.
    """
    sizes = {
        row.name: (len(_hindsight_of(row).prompt_T) + len(_hindsight_of(row).next_T), len(_hindsight_of(row).reply_T))
        for row in rows
    }
    tokens_max = max(pack_tokens, *(sum(size) for size in sizes.values()), 0)
    longest = longest_reply = 0
    comparable = set()
    for name in sorted(sizes, key=lambda name: sum(sizes[name])):
        longest, longest_reply = max(longest, sizes[name][0]), max(longest_reply, sizes[name][1])
        if longest + longest_reply <= tokens_max:
            comparable.add(name)
    return [row for row in rows if row.name in comparable]


def _prompt_with_reply(row: Row, other: Row | None = None) -> NDArray[np.int32]:
    """Return the teacher's prompt for a row: its prompt with its own reply, or with that of `other`."""
    return np.concatenate([_hindsight_of(row).prompt_T, _hindsight_of(other or row).reply_T])


def _prompt_without_reply(row: Row) -> NDArray[np.int32]:
    """Return the prompt of a row's answer, without the reply."""
    return row.token_ids_T[~row.loss_mask_T]


def _answer_after(about: Hindsight, context_T: NDArray[np.int32]) -> Row:
    """Return a row that computes the logprobs of the model's answer to the reply after the tokens `context_T`."""
    return _scored_row(np.concatenate([context_T, about.next_T]), len(context_T), about.next_temperature)


def _teacher_row(row: Row) -> Row:
    """Return a row with the contradicted answer after the teacher's prompt, which contains the reply."""
    context_T = _prompt_with_reply(row)
    tokens_T = np.concatenate([context_T, row.token_ids_T[row.loss_mask_T]])
    return _scored_row(tokens_T, len(context_T), float(row.temperature_T[-1]))


def _scored_row(tokens_T: NDArray[np.int32], start: int, temperature: float) -> Row:
    """Return a row to compute the logprobs of the tokens from `start` on. It is never trained."""
    mask_T = np.arange(len(tokens_T)) >= start
    zeros_T = np.zeros(len(tokens_T), np.float32)
    temperature_T = np.where(mask_T, np.float32(temperature), np.float32(1))
    return Row("", 0, tokens_T, mask_T, zeros_T, temperature_T, np.float32(0), ~mask_T)
