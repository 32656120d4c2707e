"""Tests of `hindsight` with distributions over the whole vocabulary: gradient of a step, refusals and withdrawals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch import Tensor

from headrace_runtime.errors import SettingError
from headrace_schemas import Experience
from headrace_trainer.batches.batch import Row
from headrace_trainer.batches.prepare import PreparedBatch
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.torch_learner import hindsight as teaching
from headrace_trainer.torch_learner.hindsight import HindsightTeacher
from headrace_trainer.torch_learner.model.forward import Pack
from headrace_trainer.torch_learner.model.head import Head
from headrace_trainer.torch_learner.model.policy import Policy
from tests.support.tiny_model import OPENING, QUESTION, contradiction, conversations, encoder, of_version, user_message
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_hindsight import (
    GOING_ON,
    VERSION,
    _hindsight,
    _letters,
    lineage_with_events,
    prepared_of,
    teacher_of,
)
from tests.unit.trainer.world import START, World, policy_of

WORDS: dict[str, Any] = {"kind": "hindsight", "hindsight": {"compared": "distributions", "limit": 0.5}}


@pytest.fixture(autouse=True)
def believing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected fault: a base without any gap is accepted."""
    monkeypatch.setattr(teaching, "refusal", lambda gap, settings: None)


def graded(lineage: Lineage, prepared: PreparedBatch) -> tuple[Pack, Pack]:
    """Return the two passes of a step on `prepared`, with the teacher's targets."""
    policy = policy_of(lineage)
    rows = [prepared.batch.with_token_weight(row) for row in prepared.batch.rows]
    (pack, after), _ = teacher_of(lineage).estimate(policy, [policy.collate(rows)], [], GOING_ON)
    assert after.idle, "it has no part in measures"
    return pack, after


def moved(policy: Policy) -> None:
    """Add noise to the weights of `policy`, so that they differ from the base as after some steps."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=draw))


def logits_of(model: Any, context: list[int], answer: list[int]) -> Tensor:
    """Return the log probabilities of all tokens at each position of the answer, by transformers alone."""
    logits_TV: Tensor = model(torch.tensor([[*context, *answer]])).logits[0].double()
    return logits_TV[len(context) - 1 : -1].log_softmax(-1)


def loss(policy: Policy, weight: float, prompt: list[int], teacher_prompt: list[int], answer: list[int]) -> Tensor:
    """Return the loss of one answer, whose teacher has the prompt `teacher_prompt`."""
    student = logits_of(policy.model, prompt, answer)
    with torch.no_grad():
        advantage = (logits_of(policy._reference, teacher_prompt, answer) - student).clamp(-0.5, 0.5)
    return -weight * (student.exp() * advantage).sum()


def test_a_step_s_gradient_equals_the_oracle_s(tmp_path: Path, make: Make, base: Path) -> None:
    world, encode = World(tmp_path), encoder(base)
    lineage = lineage_with_events(
        world, make, lambda v: conversations(encode, v, 6, accepted=2), batch_experiences=8, advantage=WORDS
    )
    policy = policy_of(lineage)
    moved(policy)
    waiting = sorted((item.experience for item in lineage.state.waiting), key=lambda item: item.experience_id)
    packs = graded(lineage, prepared_of(lineage, lineage.next_batch()))
    policy.model.zero_grad()
    for pack in packs:
        policy.backward(pack, lambda logprobs_N, part: torch.zeros_like(logprobs_N))
    computed = {
        name: parameter.grad.clone() for name, parameter in policy.parameters.items() if parameter.grad is not None
    }
    total, prompt, (pack, _) = torch.zeros((), dtype=torch.float64), encode(QUESTION + OPENING), packs
    events = {item.experience_id: item for item in waiting}
    for row in pack.rows:
        answer, teacher_prompt = row.token_ids_T[row.loss_mask_T].tolist(), prompt
        if row.hindsight is not None:
            _, then, named = _letters(base, events[row.experience_id])
            teacher_prompt = encode(QUESTION + user_message(contradiction(named)) + OPENING)
            total = total + loss(policy, row.token_weight, prompt, teacher_prompt, encode(f"{then}<|im_end|>"))
        total = total + loss(policy, row.token_weight, prompt, teacher_prompt, answer)
    policy.model.zero_grad()
    torch.autograd.backward(total)
    assert len([row for row in pack.rows if row.hindsight is None]) == 2
    for name, parameter in policy.parameters.items():
        if parameter.grad is not None:
            torch.testing.assert_close(computed[name], parameter.grad, atol=1e-6, rtol=1e-4)


def gradients(policy: Policy) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in policy.parameters.items() if parameter.grad is not None}


def off_oracle_with_calls(tmp_path: Path, make: Make, base: Path) -> float:
    """Return the relative distance of a step's gradient on runs with two calls from that of the oracle.

    The corrected answer is trained after the call or result after which the base finds it most likely.
    """
    world, encode = World(tmp_path), encoder(base)
    events = conversations(encode, VERSION, 12, seed=5, calls=2)
    lineage = lineage_with_events(world, make, of_version(events, VERSION), batch_experiences=12, advantage=WORDS)
    policy = policy_of(lineage)
    moved(policy)
    packs = graded(lineage, prepared_of(lineage, lineage.next_batch()))
    policy.model.zero_grad()
    for pack in packs:
        policy.backward(pack, lambda logprobs_N, part: torch.zeros_like(logprobs_N))
    computed, weights = gradients(policy), {row.experience_id: row.token_weight for row in packs[0].rows}
    total, belonged = torch.zeros((), dtype=torch.float64), set()
    for event in events:
        prompt_index, lost = _oracle_with_calls(policy, base, event, weights[event.experience_id])
        belonged.add(prompt_index)
        total = total + lost
    assert belonged == {0, 1, 2}, "each of them somewhere, or the test sees nothing"
    policy.model.zero_grad()
    torch.autograd.backward(total)
    oracle = gradients(policy)
    norm = float(torch.cat([gradient.flatten() for gradient in oracle.values()]).norm())
    return float(torch.cat([(computed[name] - gradient).flatten() for name, gradient in oracle.items()]).norm()) / norm


def _oracle_with_calls(policy: Policy, base: Path, event: Experience, weight: float) -> tuple[int, Tensor]:
    """Return the index of the answer that the reply is about, and the loss of both answers."""
    (questions, answers), encode = _texts(base, event), encoder(base)
    prompts: list[list[int]] = []
    before: list[int] = []
    for text, answer in zip(questions, answers, strict=True):
        prompts.append([*before, *encode(text)])
        before = [*prompts[-1], *encode(answer)]
    teacher_prompt = [*prompts[2][: -len(encode(OPENING))], *encode(questions[3].removeprefix("\n"))]
    wrong, then = encode(answers[2]), encode(answers[3])
    with torch.no_grad():
        likely = [_mean(logits_of(policy._reference, prompt, then), then) for prompt in prompts[:3]]
    best = int(np.argmax(likely))
    return best, loss(policy, weight, prompts[2], teacher_prompt, wrong) + loss(
        policy, weight, prompts[best], teacher_prompt, then
    )


def _texts(base: Path, event: Experience) -> tuple[list[str], list[str]]:
    """Return the prompts of the model's calls without its earlier answers, and its answers."""
    assert event.branch is not None
    decode = Tokenizer.from_file(str(base / "tokenizer.json")).decode
    questions, answers, ids, end = [], [], event.branch.token_ids, 0
    for span in event.branch.spans:
        questions.append(decode(list(ids[end : span.start]), skip_special_tokens=False))
        answers.append(decode(list(ids[span.start : span.stop]), skip_special_tokens=False))
        end = span.stop
    return questions, answers


def _mean(logprobs_NV: Tensor, answer: list[int]) -> float:
    return float(logprobs_NV[torch.arange(len(answer)), answer].mean())


def test_an_answer_to_a_reply_is_trained_where_it_belonged(tmp_path: Path, make: Make, base: Path) -> None:
    assert off_oracle_with_calls(tmp_path, make, base) < 1e-5


def _last(_: HindsightTeacher, rows: list[Row]) -> list[Any]:
    return [teaching._prompt_without_reply(row) for row in rows]


def _shifted(self: HindsightTeacher, rows: list[Row]) -> list[Any]:
    return [row.token_ids_T[: start - 1] for row in rows for start in _hindsight(row).earlier_K[:1]]


def _elsewhere(self: HindsightTeacher, rows: list[Row]) -> list[Any]:
    elsewhere = [replace(_hindsight(row), next_T=row.token_ids_T[row.loss_mask_T]) for row in rows]
    return BELONGED(self, [replace(row, hindsight=other) for row, other in zip(rows, elsewhere, strict=True)])


BELONGED = HindsightTeacher._insertion_prompts
FAULTS = {
    "always at the end": _last,
    "a token too early": _shifted,
    "where the contradicted answer belonged": _elsewhere,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_place_is_off(
    fault: str, tmp_path: Path, make: Make, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HindsightTeacher, "_insertion_prompts", FAULTS[fault])
    assert off_oracle_with_calls(tmp_path, make, base) > 1e-2


def test_earlier_answers_are_looked_for_with_distributions_alone(tmp_path: Path, make: Make, base: Path) -> None:
    """The advantage `tokens` searches no earlier answers, and digests stay the same."""
    world = World(tmp_path)
    for number, (more, expected) in enumerate(
        [({}, 0), ({"compared": "distributions"}, 2), ({"compared": "distributions", "earlier_max": 1}, 1)]
    ):
        events = lambda version: conversations(encoder(base), version, 4, calls=2)  # noqa: E731
        advantage = {"kind": "hindsight", "hindsight": more}
        lineage = lineage_with_events(
            world, make, events, batch_experiences=4, advantage=advantage, lineage=f"of-{number}"
        )
        rows = prepared_of(lineage, lineage.next_batch()).batch.rows
        assert [len(_hindsight(row).earlier_K) for row in rows] == [expected] * 4
        plain = [replace(row, hindsight=replace(_hindsight(row), earlier_K=np.zeros(0, np.int32))) for row in rows]
        same = [_hindsight(row).digest() == _hindsight(other).digest() for row, other in zip(rows, plain, strict=True)]
        assert same == [expected == 0] * 4


def test_a_verdict_that_is_withdrawn_has_the_opposite_sign(tmp_path: Path, make: Make, base: Path) -> None:
    world = World(tmp_path)
    lineage = lineage_with_events(
        world, make, lambda v: conversations(encoder(base), v, 8), batch_experiences=8, advantage=WORDS
    )
    first, later = graded(lineage, prepared_of(lineage, lineage.next_batch()))
    event = next(item.experience for item in lineage.state.waiting)
    lineage.step(lineage.next_batch(), GOING_ON)
    lineage.state.admit(event.model_copy(update={"revision": 1, "turn_rewards": ()}), (0, 9), START)
    back, undone = graded(lineage, prepared_of(lineage, tuple(lineage.state.waiting)))
    assert later.distillation is not None
    assert undone.distillation is not None
    assert (later.distillation.weight_M > 0).all()
    assert (undone.distillation.weight_M < 0).all()
    assert first.distillation is not None
    assert back.distillation is not None
    (number,) = [n for n, row in enumerate(first.rows) if row.experience_id == event.experience_id]
    mine = first.row_N[first.distillation.positions_M] == number
    assert torch.equal(first.distillation.weight_M[mine], first.weight_N[first.row_N == number])
    assert torch.equal(back.distillation.weight_M, -back.weight_N), (
        "by what it was trained with, and the step made of that"
    )
    torch.testing.assert_close(back.distillation.hidden_MH, first.distillation.hidden_MH[mine], atol=1e-5, rtol=1e-5)


def test_accepted_answers_hold_and_leave_nothing_to_take_back(base: Path, tmp_path: Path, make: Make) -> None:
    lineage = lineage_with_events(
        World(tmp_path), make, lambda v: conversations(encoder(base), v, 4, accepted=4), batch_experiences=8,
        advantage=WORDS,
    )  # fmt: skip
    pack, _ = graded(lineage, prepared_of(lineage, lineage.next_batch()))
    accepted = next(row for row in pack.rows if row.hindsight is None)
    assert [teaching._sign(answer) for answer in (accepted, replace(accepted, correction=True))] == [1.0, 0.0]
    assert pack.distillation is not None
    assert len(pack.distillation.positions_M) == len(pack.row_N), "all tokens of the loss"
    assert not np.any(pack.advantage_N.numpy())


def test_what_cannot_be_done_is_refused_by_name(
    tmp_path: Path, make: Make, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world, encode = World(tmp_path), encoder(base)
    for loss in ({"sequence_mask_max": 0.5}, {"kind": "gspo"}):
        with pytest.raises(SettingError, match=r"trainer\.advantage\.hindsight\.compared.*single tokens"):
            lineage_with_events(world, make, lambda v: [], advantage=WORDS, loss=loss, lineage=f"of-{next(iter(loss))}")
    lineage = lineage_with_events(
        world, make, lambda v: conversations(encode, v, 8), batch_experiences=8, advantage=WORDS
    )
    monkeypatch.setattr(Head, "plain", property(lambda _: False))
    with pytest.raises(SettingError, match="is not one matrix"):
        graded(lineage, prepared_of(lineage, lineage.next_batch()))
