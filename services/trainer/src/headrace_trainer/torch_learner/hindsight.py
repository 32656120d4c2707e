"""The base, told what the user said next, as a teacher of what it was not told
(`headrace_trainer.algorithms.catalog.hindsight`, which has the formulas).

Nothing is drawn that the runs before do not decide. What was measured, and the guard set, are saved with the
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
from headrace_statistics import student_t
from headrace_trainer.algorithms.catalog.hindsight import HindsightSettings, refusal
from headrace_trainer.algorithms.gap import BLOCK, GapEstimate, ReplyBlock
from headrace_trainer.batches.batch import Hindsight, Row, passes
from headrace_trainer.learner import Abandoned, StepRefused
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.model.taught import Taught

Floats = NDArray[np.float64]
_GAP = "gap/dealt"
_TOKENS, _SHAPES = "guard/tokens", "guard/shapes"
"""The guard set: its tokens in a row; of each answer its length, where it begins, and its temperature."""


class HindsightTeacher:
    """An `Appraiser`. The policy has to keep the first version's answers (`Policy.keep_reference`)."""

    def __init__(self, settings: HindsightSettings, pack_tokens: int) -> None:
        self._settings = settings
        self._pack_tokens = pack_tokens
        self._policy: Policy | None = None
        self._stop = threading.Event()
        self._measured: dict[str, float] = {}
        self._begin()

    def _begin(self) -> None:
        self.gap = GapEstimate()
        self.guard: deque[Row] = deque(maxlen=self._settings.guard_answers)

    @property
    def measured(self) -> Mapping[str, float]:
        return self._measured

    def appraise(
        self, policy: Policy, first: Sequence[Pack], corrections: Sequence[Pack], stop: threading.Event
    ) -> tuple[list[Pack], list[Pack]]:
        """Raises `StepRefused` while the gap is not positive. Only what is trained is remembered: rows of a step that
        is not taken are measured again with the batch that they are in next."""
        self._policy, self._stop, self._measured = policy, stop, {}
        rows = [row for one in first for row in one.rows]
        contradicted = sorted((row for row in rows if row.hindsight is not None), key=lambda row: row.name)
        if contradicted:
            gap = self.gap.plus(self.blocks(contradicted))
            if (refused := refusal(gap, self._settings)) is not None:
                raise StepRefused("hindsight_gap", gap.mean, refused.why, undecided=refused.undecided)
            self.gap = gap
            self._measured = {
                "hindsight_gap": gap.mean,
                "hindsight_gap_chance": gap.p_value,
                "hindsight_runs": float(gap.count),
            }
        self.guard.extend(sorted((row for row in rows if row.hindsight is None), key=lambda row: row.name))
        if self._settings.compared == "distributions":
            return self._followed(first), self._followed(corrections)
        return [self._graded(one) for one in first], [self._graded(one) for one in corrections]

    def learn(self) -> Mapping[str, float]:
        """The weights have moved: how far has the guard set dropped?"""
        guard = list(self.guard)
        if len(guard) > 1:
            before, after = self._base(guard), self._logprobs(guard, reference=False)
            drops = [float((one - other).mean()) for one, other in zip(before, after, strict=True)]
            self._measured |= {"guard_drop_mean": fmean(drops), "guard_drop": student_t.lower_bound(drops, 0.025)}
        return {}

    def blocks(self, rows: Sequence[Row]) -> list[ReplyBlock]:
        """How likely the base finds the answers to replies, of the first contradicted answer of each run. A run has its
        own reply, those of its block, and none. No block: there is only one run."""
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
            for context in (*(_told(row, other) for other in part), _untold(row))
        ]
        found = iter(self._base([_asked(_of(row), context) for row, context in contexts]))
        means = [np.array([[float(next(found).mean()) for _ in (*part, None)] for _ in part]) for part in parts]
        return [ReplyBlock(both[:, :-1], both[:, -1]) for both in means]

    def _graded(self, one: Pack) -> Pack:
        """The pass with the advantage of each token: of a contradicted answer what the teacher says, with the sign of
        its row."""
        told = [row for row in one.rows if row.hindsight is not None]
        teacher = iter(self._base([_taught(row) for row in told]))
        settings, found = self._settings, []
        for row in one.rows:
            if row.hindsight is None:
                found.append(np.zeros(row.tokens))
                continue
            gap_N = next(teacher) - row.behaviour_T[row.loss_mask_T]
            found.append(float(row.advantage) * settings.coefficient * gap_N.clip(-settings.limit, settings.limit))
        return replace(one, advantage_N=torch.from_numpy(np.concatenate(found)).to(one.advantage_N))

    def _followed(self, packs: Sequence[Pack]) -> list[Pack]:
        """The passes with what a teacher thinks of all words: the base, which was told where an answer was
        contradicted, and was not where one was accepted. Beside them the answers to the replies, as if nothing had
        been replied, where they belonged. Raises `SettingError` where logits cannot be made chunk by chunk."""
        assert self._policy is not None
        policy = self._policy
        if not (policy.head.plain and policy.reference_head.plain):
            remedy = 'the output head of this model is not one matrix, or has an adapter; set "tokens"'
            raise SettingError("trainer.advantage.hindsight.compared", self._settings.compared, remedy)
        found = []
        for one in packs:
            teachers = [row if row.hindsight is None else _taught(row) for row in one.rows]
            found.append(self._follow(one, teachers, [_sign(row) * row.token_weight for row in one.rows]))
        told = [row for one in packs for row in one.rows if row.hindsight is not None]
        answers = [_asked(_of(row), context) for row, context in zip(told, self._belonged(told), strict=True)]
        for chosen in passes(answers, self._pack_tokens):
            one = policy.collate([answers[index] for index in chosen])
            teachers = [_asked(_of(told[index]), _told(told[index])) for index in chosen]
            found.append(
                self._follow(one, teachers, [_sign(told[index]) * told[index].token_weight for index in chosen])
            )
        return found

    def _belonged(self, rows: Sequence[Row]) -> list[NDArray[np.int32]]:
        """Of each contradicted answer the prompt after which what was answered to its reply belonged: the base finds
        it likeliest there, told nothing."""
        contexts = [[*(row.token_ids_T[:start] for start in _of(row).earlier_K), _untold(row)] for row in rows]
        unclear = [(row, one) for row, many in zip(rows, contexts, strict=True) for one in many if len(many) > 1]
        likely = iter([one.mean() for one in self._base([_asked(_of(row), context) for row, context in unclear])])
        return [max(many, key=lambda _: next(likely)) if len(many) > 1 else many[0] for many in contexts]

    def _follow(self, one: Pack, teachers: Sequence[Row], weights: Sequence[float]) -> Pack:
        """`teachers`: rows whose loss tokens are those of the pass, after what the teacher is told; `weights`: of each
        row's tokens, with its sign."""
        assert self._policy is not None
        weight_N = torch.tensor(weights).to(one.weight_N)[one.row_N]
        (places_M,) = weight_N.nonzero(as_tuple=True)
        hidden_MH = torch.cat(self._hidden(teachers))[places_M]
        weight_M = self._settings.coefficient * weight_N[places_M]
        answer, limit = self._policy.reference_head.answer, self._settings.limit
        taught = Taught(places_M, hidden_MH, weight_M, answer, limit)
        return replace(one, advantage_N=torch.zeros_like(one.advantage_N), taught=taught)

    def _hidden(self, rows: Sequence[Row]) -> list[Tensor]:
        """What the base asks its head about the loss tokens of each row. Raises `Abandoned`."""
        assert self._policy is not None
        return self._each(rows, self._policy.reference_hidden)

    def _base(self, rows: Sequence[Row]) -> list[Floats]:
        return self._logprobs(rows, reference=True)

    def _logprobs(self, rows: Sequence[Row], *, reference: bool) -> list[Floats]:
        """Of the loss tokens of each row, under the base or the present weights. Raises `Abandoned`."""
        assert self._policy is not None
        policy = self._policy
        ask = policy.reference_logprobs if reference else lambda pack: policy.logprobs(pack)[0]
        return [each.double().cpu().numpy() for each in self._each(rows, ask)]

    @torch.no_grad()
    def _each(self, rows: Sequence[Row], ask: Callable[[Pack], Tensor]) -> list[Tensor]:
        """The part of each row in what `ask` answers about the loss tokens of a pass."""
        assert self._policy is not None
        found: dict[int, Tensor] = {}
        for chosen in passes(rows, self._pack_tokens):
            if self._stop.is_set():
                raise Abandoned
            answer = ask(self._policy.collate([rows[index] for index in chosen]))
            found |= zip(chosen, torch.split(answer, [rows[index].tokens for index in chosen]), strict=True)
        return [found[index] for index in range(len(rows))]

    def state(self) -> dict[str, Tensor]:
        known = (self.gap.count, self.gap.total, self.gap.observed, *self.gap.permuted)
        found = {_GAP: torch.tensor(known, dtype=torch.float64)}
        if self.guard:
            found[_TOKENS] = torch.from_numpy(np.concatenate([row.token_ids_T for row in self.guard]))
            shapes = [(row.length, row.length - row.tokens, float(row.temperature_T[-1])) for row in self.guard]
            found[_SHAPES] = torch.tensor(shapes, dtype=torch.float64)
        return found

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._begin()
        if _GAP in state:
            count, total, as_said, *dealt = state[_GAP].tolist()
            self.gap = GapEstimate(int(count), total, as_said, tuple(dealt))
        begin = 0
        for length, start, temperature in state[_SHAPES].tolist() if _SHAPES in state else ():
            tokens_T = state[_TOKENS][begin : begin + int(length)].numpy().astype(np.int32)
            self.guard.append(_row(tokens_T, int(start), temperature))
            begin += int(length)


def _of(row: Row) -> Hindsight:
    assert row.hindsight is not None
    return row.hindsight


def _sign(row: Row) -> float:
    """Accepted answers hold the policy where it was right; of that there is nothing to take back."""
    return float(not row.correction if row.hindsight is None else row.advantage)


def _comparable(rows: Sequence[Row], pack_tokens: int) -> list[Row]:
    """Those whose replies may be dealt out: no sequence becomes longer than a pass, or than one of these rows is. The
    longest are left out."""
    sizes = {row.name: (len(_of(row).prompt_T) + len(_of(row).next_T), len(_of(row).reply_T)) for row in rows}
    room = max(pack_tokens, *(sum(one) for one in sizes.values()), 0)
    asked = replied = 0
    kept = set()
    for name in sorted(sizes, key=lambda name: sum(sizes[name])):
        asked, replied = max(asked, sizes[name][0]), max(replied, sizes[name][1])
        if asked + replied <= room:
            kept.add(name)
    return [row for row in rows if row.name in kept]


def _told(row: Row, other: Row | None = None) -> NDArray[np.int32]:
    """The teacher's prompt, with the reply of `other` if there is one."""
    return np.concatenate([_of(row).prompt_T, _of(other or row).reply_T])


def _untold(row: Row) -> NDArray[np.int32]:
    """The prompt as it was."""
    return row.token_ids_T[~row.loss_mask_T]


def _asked(about: Hindsight, context_T: NDArray[np.int32]) -> Row:
    """The answer to the reply, after some context."""
    return _row(np.concatenate([context_T, about.next_T]), len(context_T), about.next_temperature)


def _taught(row: Row) -> Row:
    """The contradicted answer, after what the teacher was told."""
    context_T = _told(row)
    tokens_T = np.concatenate([context_T, row.token_ids_T[row.loss_mask_T]])
    return _row(tokens_T, len(context_T), float(row.temperature_T[-1]))


def _row(tokens_T: NDArray[np.int32], start: int, temperature: float) -> Row:
    """Only to be asked about from `start` on."""
    mask_T = np.arange(len(tokens_T)) >= start
    zeros_T = np.zeros(len(tokens_T), np.float32)
    temperature_T = np.where(mask_T, np.float32(temperature), np.float32(1))
    return Row("", 0, tokens_T, mask_T, zeros_T, temperature_T, np.float32(0), ~mask_T)
