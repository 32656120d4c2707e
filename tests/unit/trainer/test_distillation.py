"""Tests that the gradient of a distillation target over the whole vocabulary equals torch's autograd on full logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from headrace_trainer.torch_learner.model import head as heads
from headrace_trainer.torch_learner.model.distillation import DistillationTarget
from headrace_trainer.torch_learner.model.head import Head
from headrace_trainer.torch_learner.model.head_tail import Tail

TOKENS, HIDDEN, WORDS = 23, 6, 11
PLACES = (0, 3, 4, 5, 11, 12, 22)
TAILS = {"plain": Tail(), "scaled": Tail(scale=0.5), "capped": Tail(cap=2.0)}


class Pass:
    """Random student, teacher and loss tokens of a pass, each with a temperature, a sampled token and a slope."""

    def __init__(self, tail: Tail, limit: float, sign: float = 1.0) -> None:
        draw = torch.Generator().manual_seed(7)
        self.tail, self.limit = tail, limit
        self.student, self.teacher = (nn.Linear(HIDDEN, WORDS, bias=bias) for bias in (True, False))
        for module in (self.student, self.teacher):
            for parameter in module.parameters():
                parameter.data = torch.randn(parameter.shape, generator=draw)
        self.hidden_NH = torch.randn(TOKENS, HIDDEN, generator=draw).requires_grad_()
        self.teacher_MH = torch.randn(len(PLACES), HIDDEN, generator=draw)
        self.targets_N = torch.randint(WORDS, (TOKENS,), generator=draw)
        self.temperature_N = torch.rand(TOKENS, generator=draw) + 0.5
        self.slope_N = torch.randn(TOKENS, generator=draw)
        self.weight_M = sign * torch.rand(len(PLACES), generator=draw)
        self.positions_M = torch.tensor(PLACES)

    def gradients(self) -> list[Tensor]:
        answer = Head(self.teacher, self.tail).answer
        target = DistillationTarget(self.positions_M, self.teacher_MH, self.weight_M, answer, self.limit)
        inputs = (self.hidden_NH, self.targets_N, self.temperature_N, lambda _, part: self.slope_N[part], target)
        self.student.zero_grad()
        *_, of_hidden = Head(self.student, self.tail).backward(*inputs)
        assert of_hidden is not None
        return [of_hidden, *self._gradients()]

    def sampled(self) -> Tensor | None:
        """Return the gradient of the hidden states without a teacher."""
        inputs = (self.hidden_NH, self.targets_N, self.temperature_N, lambda _, part: self.slope_N[part])
        return Head(self.student, self.tail).backward(*inputs)[2]

    def torchs(self) -> list[Tensor]:
        """Return the gradients that autograd computes from all logits."""
        self.student.zero_grad()
        log_NV = (self.tail(self.student(self.hidden_NH)) / self.temperature_N[:, None]).log_softmax(-1)
        log_MV, temperature_M = log_NV[self.positions_M], self.temperature_N[self.positions_M]
        with torch.no_grad():
            teacher_MV = (self.tail(self.teacher(self.teacher_MH)) / temperature_M[:, None]).log_softmax(-1)
            advantage_MV = (teacher_MV - log_MV).clamp(-self.limit, self.limit)
        sampled = (log_NV.gather(-1, self.targets_N[:, None]).squeeze(-1) * self.slope_N).sum()
        loss = sampled - (self.weight_M * (log_MV.exp() * advantage_MV).sum(-1)).sum()
        (of_hidden,) = torch.autograd.grad(loss, self.hidden_NH, retain_graph=True)
        torch.autograd.backward(loss, inputs=list(self.student.parameters()))
        return [of_hidden, *self._gradients()]

    def divergence(self) -> Tensor:
        """Return the gradient of KL(student || teacher) with respect to the student's hidden states."""
        log_NV = (self.tail(self.student(self.hidden_NH)) / self.temperature_N[:, None]).log_softmax(-1)
        temperature_M = self.temperature_N[self.positions_M, None]
        teacher_MV = (self.tail(self.teacher(self.teacher_MH)) / temperature_M).log_softmax(-1)
        kl_M = nn.functional.kl_div(teacher_MV, log_NV[self.positions_M], reduction="none", log_target=True).sum(-1)
        (gradient,) = torch.autograd.grad((self.weight_M * kl_M).sum(), self.hidden_NH)
        return gradient

    def _gradients(self) -> list[Any]:
        return [None if each.grad is None else each.grad.clone() for each in self.student.parameters()]


@pytest.fixture(params=[1, 4, 1000], ids="{} tokens a chunk".format, autouse=True)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "CHUNK_BYTES", 4 * WORDS * request.param)


@pytest.mark.parametrize("tail", TAILS)
@pytest.mark.parametrize("limit", [0.3, 5.0])
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["first", "taken back"])
def test_gradients_are_those_of_whole_logits(tail: str, limit: float, sign: float) -> None:
    head_pass = Pass(TAILS[tail], limit, sign)
    for computed, other in zip(head_pass.gradients(), head_pass.torchs(), strict=True):
        torch.testing.assert_close(computed, other, atol=2e-5, rtol=2e-5)


def test_without_the_clip_it_is_the_divergence_from_the_teacher() -> None:
    head_pass = Pass(Tail(), 1e9)
    head_pass.slope_N.zero_()
    torch.testing.assert_close(head_pass.gradients()[0], head_pass.divergence(), atol=2e-5, rtol=2e-5)


def test_it_is_the_mean_over_what_might_have_been_sampled() -> None:
    """Weight the gradient of each possible token with its probability: the expectation of the sampled estimator."""
    head_pass = Pass(Tail(), 0.7)
    head_pass.slope_N.zero_()
    expected = head_pass.gradients()[0]
    with torch.no_grad():
        log_NV = (head_pass.student(head_pass.hidden_NH) / head_pass.temperature_N[:, None]).log_softmax(-1)
        temperature_M = head_pass.temperature_N[head_pass.positions_M, None]
        teacher_MV = (head_pass.teacher(head_pass.teacher_MH) / temperature_M).log_softmax(-1)
    total = torch.zeros_like(expected)
    for word in range(WORDS):
        head_pass.targets_N = torch.full((TOKENS,), word)
        advantage_M = (teacher_MV[:, word] - log_NV[head_pass.positions_M, word]).clamp(-0.7, 0.7)
        slope_N = torch.zeros(TOKENS)
        slope_N[head_pass.positions_M] = -head_pass.weight_M * advantage_M * log_NV[head_pass.positions_M, word].exp()
        head_pass.slope_N = slope_N
        draw = head_pass.sampled()
        assert draw is not None
        total += draw
    torch.testing.assert_close(expected, total, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("fault", ["the teacher's sign", "a place too far", "no temperature"])
def test_planted_faults_are_off(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head_pass = Pass(Tail(), 5.0)
    expected = head_pass.torchs()[0]
    original = DistillationTarget.gradient

    def wrong(target: DistillationTarget, part: slice, log: Tensor, shares: Tensor, temperature: Tensor) -> Any:
        if fault == "no temperature":
            return original(target, part, log, shares, torch.ones_like(temperature))
        result = original(target, part, log, shares, temperature)
        if result is None:
            return None
        indices, gradient = result
        return (indices, -gradient) if fault == "the teacher's sign" else ((indices + 1) % len(log), gradient)

    monkeypatch.setattr(DistillationTarget, "gradient", wrong)
    close = torch.allclose(head_pass.gradients()[0], expected, atol=1e-3)
    assert not close or (fault == "a place too far" and heads.CHUNK_BYTES == 4 * WORDS), "one place has no next"
