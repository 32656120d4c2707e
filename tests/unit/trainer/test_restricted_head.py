"""Tests that values and gradients of the head at restricted positions equal those of full logits, for each code
path."""

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
from headrace_trainer.experiences.token_sets import TokenSets, set_of_bits, set_of_ids
from headrace_trainer.torch_learner.model import head, head_compiled
from headrace_trainer.torch_learner.model.distillation import DistillationTarget
from headrace_trainer.torch_learner.model.head import Head
from headrace_trainer.torch_learner.model.head_tail import Tail
from headrace_trainer.torch_learner.model.pack_sets import PackSets
from tests.unit.trainer.test_head import assert_close, gradients, problem

WORDS = 37
TAILS = [Tail(), Tail(scale=0.0625), Tail(cap=5.0)]
CPU = torch.device("cpu")


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
@settings(max_examples=25, deadline=None, derandomize=True)
@given(tokens=st.integers(1, 24), seed=st.integers(0, 1000), bias=st.booleans(), tail=st.sampled_from(TAILS))
def test_restricted_head_is_the_textbook(way: str, tokens: int, seed: int, bias: bool, tail: Tail) -> None:
    inputs = problem(tokens, seed, bias=bias)
    sets, allowed = random_sets(inputs[2], seed)
    assert_close(computed(way, inputs, sets, tail), textbook(inputs, allowed, tail))


def test_restricted_compiled_head_is_the_textbook(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_compiled, "fused", lambda function: function)
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


@settings(max_examples=100, deadline=None, derandomize=True)
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
