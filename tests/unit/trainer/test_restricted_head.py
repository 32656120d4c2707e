"""Tests of the head beside full logits: values and gradients at restricted positions and for distillation targets."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headrace_trainer.batches.batch import Row
from headrace_trainer.experiences.restrictions import TokenSets, set_of_bits, set_of_ids
from headrace_trainer.torch_learner.model import head, head_compiled
from headrace_trainer.torch_learner.model.distillation import DistillationTarget
from headrace_trainer.torch_learner.model.head import Head
from headrace_trainer.torch_learner.model.head_tail import Tail
from headrace_trainer.torch_learner.model.pack_sets import PackSets
from tests.unit.trainer.test_head import assert_close, gradients, problem

WORDS = 37
TAILS = [Tail(), Tail(scale=0.0625), Tail(cap=5.0)]
CPU = torch.device("cpu")
TOKENS, HIDDEN, VOCABULARY = 23, 6, 11
PLACES = (0, 3, 4, 5, 11, 12, 22)
NAMED_TAILS = {"plain": Tail(), "scaled": Tail(scale=0.5), "capped": Tail(cap=2.0)}


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "CHUNK_BYTES", 4 * WORDS * 5)  # five tokens
        yield


def random_sets(targets: Tensor, seed: int) -> tuple[PackSets | None, Tensor]:
    """Return sets for some of the positions, small and large ones in two rows, and the equivalent mask."""
    draw = random.Random(seed)
    allowed = torch.ones(len(targets), WORDS, dtype=torch.bool)
    shared = set_of_ids(range(0, WORDS, 2), WORDS)
    rows, split = [], draw.randrange(1, len(targets) + 1)
    for first, last in ((0, split), (split, len(targets))):
        positions, sets = [], []
        for number in range(first, last):
            kind = draw.choice(["all", "one", "few", "many", "shared"])
            target = int(targets[number])
            if kind == "all":
                continue
            ids = {target, *draw.sample(range(WORDS), {"one": 0, "few": 1, "many": 20, "shared": 0}[kind])}
            if kind == "shared" and target % 2 == 0:
                ids = {*range(0, WORDS, 2)}
            sets.append(shared if len(ids) == len(range(0, WORDS, 2)) else set_of_ids([*ids], WORDS))
            allowed[number] = False
            allowed[number, sorted(ids)] = True
            positions.append(number - first + 1)
        if last > first:
            length = last - first + 1
            token_ids = np.zeros(length, np.int32)
            mask, zeros = np.arange(length) > 0, np.zeros(length, np.float32)
            token_sets = TokenSets(np.array(positions, np.int32), tuple(sets)) if positions else None
            rows.append(Row("", 0, token_ids, mask, zeros, zeros + 1, np.float32(0), ~mask, sets=token_sets))
    return PackSets.of(rows, CPU), allowed


def textbook(tokens: tuple[Any, ...], allowed: Tensor, tail: Tail) -> dict[str, Tensor]:
    """Return the values computed in float64 from all logits at once, with minus infinity outside `allowed`."""
    module, hidden, targets, temperature, upstream = tokens
    exact = nn.Linear(8, WORDS, bias=module.bias is not None).double()
    for mine, given_parameter in zip(exact.parameters(), module.parameters(), strict=True):
        mine.data = given_parameter.detach().double()
    leaf = hidden.detach().double().requires_grad_()
    raw = exact(leaf) * tail.scale
    logits = raw if tail.cap is None else tail.cap * torch.tanh(raw / tail.cap)
    scaled = (logits / temperature.double()[:, None]).masked_fill(~allowed, float("-inf"))
    log = scaled.log_softmax(-1)
    entropy = -(log.exp() * log.masked_fill(~allowed, 0.0)).sum(-1)
    return gradients(exact, leaf, log[torch.arange(len(log)), targets], entropy, upstream)


def computed(way: str, tokens: tuple[Any, ...], sets: PackSets | None, tail: Tail) -> dict[str, Tensor]:
    module, hidden, targets, temperature, upstream = tokens
    if way in ("chunks", "any head"):
        if way == "any head":
            module.register_forward_hook(lambda *_: None)
        return gradients(module, hidden, *Head(module, tail).logprobs(hidden, targets, temperature, sets), upstream)
    if way == "compiled":
        inputs = (hidden, targets, temperature, lambda _, part: upstream[part], torch.float32, sets)
        logprobs, entropy, gradient = head_compiled.backward(module.weight, module.bias, *inputs)
    else:
        slope = lambda logprobs, part: upstream[part].to(logprobs.dtype)  # noqa: E731
        logprobs, entropy, gradient = Head(module, tail).backward(hidden, targets, temperature, slope, None, sets)
    tensors = {"logprobs": logprobs, "entropy": entropy, "hidden": gradient}
    tensors |= {name: parameter.grad for name, parameter in module.named_parameters()}
    return {name: tensor.double() for name, tensor in tensors.items() if tensor is not None}


@pytest.mark.parametrize("way", ["chunks", "any head", "at once"])
@settings(max_examples=25, derandomize=True)
@given(tokens=st.integers(1, 24), seed=st.integers(0, 1000), bias=st.booleans(), tail=st.sampled_from(TAILS))
def test_restricted_head_is_the_textbook(way: str, tokens: int, seed: int, bias: bool, tail: Tail) -> None:
    inputs = problem(tokens, seed, bias=bias)
    sets, allowed = random_sets(inputs[2], seed)
    assert_close(computed(way, inputs, sets, tail), textbook(inputs, allowed, tail))


def test_restricted_compiled_head_is_the_textbook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_compiled, "compile_per_shape", lambda function: function)
    monkeypatch.setattr(head_compiled, "CHUNK_BYTES", 4 * WORDS * 5)
    for seed in range(5):
        inputs = problem(17, seed, bias=True)
        sets, allowed = random_sets(inputs[2], seed)
        assert_close(computed("compiled", inputs, sets, Tail()), textbook(inputs, allowed, Tail()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forced_tokens_have_logprob_zero_and_no_gradient(dtype: torch.dtype) -> None:
    module, hidden, targets, temperature, upstream = problem(9, 3, dtype=dtype)
    forced = TokenSets(np.arange(1, 10, dtype=np.int32), tuple(set_of_ids([int(target)], WORDS) for target in targets))
    mask, zeros = np.arange(10) > 0, np.zeros(10, np.float32)
    row = Row("", 0, np.zeros(10, np.int32), mask, zeros, zeros + 1, np.float32(0), ~mask, sets=forced)
    sets = PackSets.of([row], CPU)
    assert sets is not None
    tensors = computed("at once", (module, hidden, targets, temperature, upstream), sets, Tail())
    assert not any(tensor.any() for tensor in tensors.values())


def test_distillation_target_is_over_the_allowed_tokens_alone() -> None:
    """The target is the gradient of KL(p_s || p_t), both restricted, with a clip that has no effect."""
    inputs = problem(12, 4)
    module, hidden, targets, temperature, _ = inputs
    sets, allowed = random_sets(targets, 4)
    teacher_hidden = hidden.detach() + 0.3 * torch.randn(12, 8, generator=torch.Generator().manual_seed(5))
    weights = torch.rand(12, generator=torch.Generator().manual_seed(6))
    chunked_head = Head(module, Tail())
    target = DistillationTarget(torch.arange(12), teacher_hidden, weights, chunked_head.answer, 1e6)
    slope = lambda logprobs, _: torch.zeros_like(logprobs)  # noqa: E731
    _, _, gradient = chunked_head.backward(hidden, targets, temperature, slope, target, sets)
    leaf = hidden.detach().double().requires_grad_()
    exact = nn.Linear(8, WORDS, bias=False).double()
    exact.weight.data = module.weight.detach().double()

    def log_of(states: Tensor) -> Tensor:
        scaled: Tensor = exact(states) / temperature.double()[:, None]
        return scaled.masked_fill(~allowed, float("-inf")).log_softmax(-1)

    student, teacher = log_of(leaf), log_of(teacher_hidden.double()).detach()
    gap = (student - teacher).masked_fill(~allowed, 0.0)
    ((student.exp() * gap).sum(-1) * weights.double()).sum().backward()  # type: ignore[no-untyped-call]
    assert gradient is not None
    torch.testing.assert_close(gradient.double(), leaf.grad, rtol=1e-4, atol=1e-5)


@settings(max_examples=100, derandomize=True)
@given(vocabulary=st.integers(1, 300), data=st.data())
def test_sets_of_bits_and_of_ids_are_equal(vocabulary: int, data: st.DataObject) -> None:
    ids = data.draw(st.sets(st.integers(0, vocabulary - 1), min_size=1))
    words = np.zeros((vocabulary + 31) // 32 + 1, np.uint32)
    words[-1] = 0xFFFFFFFF  # tokens that the model does not have
    for token in ids:
        words[token // 32] |= np.uint32(1 << token % 32)
    of_bits = set_of_bits(words.view(np.int32), vocabulary)
    if len(ids) == vocabulary:
        assert of_bits is None
        return
    assert of_bits is not None
    of_ids = set_of_ids([*ids], vocabulary)
    assert of_bits.dtype == of_ids.dtype
    assert of_bits.tolist() == of_ids.tolist()


class Pass:
    """Random student, teacher and loss tokens of a pass, each with a temperature, a sampled token and a slope."""

    def __init__(self, tail: Tail, limit: float, sign: float = 1.0) -> None:
        draw = torch.Generator().manual_seed(7)
        self.tail, self.limit = tail, limit
        self.student, self.teacher = (nn.Linear(HIDDEN, VOCABULARY, bias=bias) for bias in (True, False))
        for module in (self.student, self.teacher):
            for parameter in module.parameters():
                parameter.data = torch.randn(parameter.shape, generator=draw)
        self.hidden_NH = torch.randn(TOKENS, HIDDEN, generator=draw).requires_grad_()
        self.teacher_MH = torch.randn(len(PLACES), HIDDEN, generator=draw)
        self.targets_N = torch.randint(VOCABULARY, (TOKENS,), generator=draw)
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


@pytest.fixture(params=[1, 4, 1000], ids="{} tokens a chunk".format)
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "CHUNK_BYTES", 4 * VOCABULARY * request.param)


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("tail", NAMED_TAILS)
@pytest.mark.parametrize("limit", [0.3, 5.0])
@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["first", "taken back"])
def test_gradients_are_those_of_whole_logits(tail: str, limit: float, sign: float) -> None:
    head_pass = Pass(NAMED_TAILS[tail], limit, sign)
    for computed, other in zip(head_pass.gradients(), head_pass.torchs(), strict=True):
        torch.testing.assert_close(computed, other, atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("chunks")
def test_without_the_clip_it_is_the_divergence_from_the_teacher() -> None:
    head_pass = Pass(Tail(), 1e9)
    head_pass.slope_N.zero_()
    torch.testing.assert_close(head_pass.gradients()[0], head_pass.divergence(), atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("chunks")
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
    for word in range(VOCABULARY):
        head_pass.targets_N = torch.full((TOKENS,), word)
        advantage_M = (teacher_MV[:, word] - log_NV[head_pass.positions_M, word]).clamp(-0.7, 0.7)
        slope_N = torch.zeros(TOKENS)
        slope_N[head_pass.positions_M] = -head_pass.weight_M * advantage_M * log_NV[head_pass.positions_M, word].exp()
        head_pass.slope_N = slope_N
        draw = head_pass.sampled()
        assert draw is not None
        total += draw
    torch.testing.assert_close(expected, total, atol=2e-5, rtol=2e-5)


@pytest.mark.usefixtures("chunks")
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
    assert not close or (fault == "a place too far" and head.CHUNK_BYTES == 4 * VOCABULARY), "one place has no next"
