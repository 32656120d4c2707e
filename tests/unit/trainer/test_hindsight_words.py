"""`hindsight` with whole distributions: a step's gradient, what it refuses, and what is taken back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace_runtime.errors import SettingError
from headrace_trainer.batches.prepare import Prepared
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.torch_learner import hindsight as teaching
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.head import Head
from headrace_trainer.torch_learner.model.policy import Policy
from tests.support.hindsight_world import ASKED, OPENING, contradiction, conversations, encoder, said
from tests.support.torch_learners import policy_of
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_hindsight import GOING_ON, _letters, opened, prepared_of, teacher_of
from tests.unit.trainer.world import START, World

WORDS: dict[str, Any] = {"kind": "hindsight", "hindsight": {"compared": "distributions", "limit": 0.5}}


@pytest.fixture(autouse=True)
def believing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base that learned nothing is believed all the same."""
    monkeypatch.setattr(teaching, "refusal", lambda gap, settings: None)


def graded(lineage: Lineage, prepared: Prepared) -> tuple[Pack, Pack]:
    """The pass of a step on these, with what the teacher says, and that of the answers to the replies."""
    policy = policy_of(lineage)
    rows = [prepared.batch.weighted(row) for row in prepared.batch.rows]
    (pack, after), _ = teacher_of(lineage).appraise(policy, [policy.collate(rows)], [], GOING_ON)
    assert after.idle, "it has no part in measures"
    return pack, after


def moved(policy: Policy) -> None:
    """Away from the base, as after some steps."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))


def whole(model: Any, context: list[int], answer: list[int]) -> Tensor:
    """log pi of all words at each place of the answer, by transformers alone."""
    logits_TV: Tensor = model(torch.tensor([[*context, *answer]])).logits[0].double()
    return logits_TV[len(context) - 1 : -1].log_softmax(-1)


def loss(policy: Policy, weight: float, prompt: list[int], told: list[int], answer: list[int]) -> Tensor:
    """Of one answer, whose teacher has `told` for a prompt."""
    student = whole(policy.model, prompt, answer)
    with torch.no_grad():
        advantage = (whole(policy._reference, told, answer) - student).clamp(-0.5, 0.5)
    return -weight * (student.exp() * advantage).sum()


def test_a_step_s_gradient_equals_the_oracle_s(tmp_path: Path, make: Make, base: Path) -> None:
    world, encode = World(tmp_path), encoder(base)
    lineage = opened(
        world, make, lambda v: conversations(encode, v, 6, accepted=2), batch_experiences=8, advantage=WORDS
    )
    policy = policy_of(lineage)
    moved(policy)
    waiting = sorted((one.experience for one in lineage.state.waiting), key=lambda one: one.experience_id)
    packs = graded(lineage, prepared_of(lineage, lineage.next_batch()))
    policy.model.zero_grad()
    for pack in packs:
        policy.backward(pack, lambda logprobs_N, part: torch.zeros_like(logprobs_N))
    ours = {name: parameter.grad.clone() for name, parameter in policy.parameters.items() if parameter.grad is not None}
    total, prompt, (pack, _) = torch.zeros((), dtype=torch.float64), encode(ASKED + OPENING), packs
    events = {one.experience_id: one for one in waiting}
    for row in pack.rows:
        answer, told = row.token_ids_T[row.loss_mask_T].tolist(), prompt
        if row.hindsight is not None:
            _, then, named = _letters(base, events[row.experience_id])
            told = encode(ASKED + said(contradiction(named)) + OPENING)
            total = total + loss(policy, row.token_weight, prompt, told, encode(f"{then}<|im_end|>"))
        total = total + loss(policy, row.token_weight, prompt, told, answer)
    policy.model.zero_grad()
    torch.autograd.backward(total)
    assert len([row for row in pack.rows if row.hindsight is None]) == 2
    for name, parameter in policy.parameters.items():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name], parameter.grad, atol=1e-6, rtol=1e-4)


def test_a_verdict_that_is_withdrawn_has_the_opposite_sign(tmp_path: Path, make: Make, base: Path) -> None:
    world = World(tmp_path)
    lineage = opened(world, make, lambda v: conversations(encoder(base), v, 8), batch_experiences=8, advantage=WORDS)
    first, later = graded(lineage, prepared_of(lineage, lineage.next_batch()))
    event = next(one.experience for one in lineage.state.waiting)
    lineage.step(lineage.next_batch(), GOING_ON)
    lineage.state.admit(event.model_copy(update={"revision": 1, "turn_rewards": ()}), (0, 9), START)
    back, undone = graded(lineage, prepared_of(lineage, tuple(lineage.state.waiting)))
    assert later.taught is not None
    assert undone.taught is not None
    assert (later.taught.weight_M > 0).all()
    assert (undone.taught.weight_M < 0).all()
    assert first.taught is not None
    assert back.taught is not None
    (number,) = [n for n, row in enumerate(first.rows) if row.experience_id == event.experience_id]
    mine = first.row_N[first.taught.places_M] == number
    assert torch.equal(first.taught.weight_M[mine], first.weight_N[first.row_N == number])
    assert torch.equal(back.taught.weight_M, -back.weight_N), "by what it was trained with, and the step made of that"
    torch.testing.assert_close(back.taught.hidden_MH, first.taught.hidden_MH[mine], atol=1e-5, rtol=1e-5)


def test_accepted_answers_hold_and_leave_nothing_to_take_back(base: Path, tmp_path: Path, make: Make) -> None:
    lineage = opened(
        World(tmp_path), make, lambda v: conversations(encoder(base), v, 4, accepted=4), batch_experiences=8,
        advantage=WORDS,
    )  # fmt: skip
    pack, _ = graded(lineage, prepared_of(lineage, lineage.next_batch()))
    accepted = next(row for row in pack.rows if row.hindsight is None)
    assert [teaching._sign(one) for one in (accepted, replace(accepted, correction=True))] == [1.0, 0.0]
    assert pack.taught is not None
    assert len(pack.taught.places_M) == len(pack.row_N), "all tokens of the loss"
    assert not np.any(pack.advantage_N.numpy())


def test_what_cannot_be_done_is_refused_by_name(
    tmp_path: Path, make: Make, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, encode = World(tmp_path), encoder(base)
    for loss in ({"sequence_mask_max": 0.5}, {"kind": "gspo"}):
        with pytest.raises(SettingError, match=r"trainer\.advantage\.hindsight\.compared.*token by token"):
            opened(world, make, lambda v: [], advantage=WORDS, loss=loss, lineage=f"of-{next(iter(loss))}")
    lineage = opened(world, make, lambda v: conversations(encode, v, 8), batch_experiences=8, advantage=WORDS)
    monkeypatch.setattr(Head, "plain", property(lambda _: False))
    with pytest.raises(SettingError, match="is not one matrix"):
        graded(lineage, prepared_of(lineage, lineage.next_batch()))
