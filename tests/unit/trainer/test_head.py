"""Tests of the output head in chunks: values and gradients equal those of full logits, without a tokens x vocabulary
tensor."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from headrace_trainer.batches.batch import Row
from headrace_trainer.settings import ComputeSettings, LoraSettings
from headrace_trainer.torch_learner.model import forward, head, head_compiled
from headrace_trainer.torch_learner.model.head import Head
from headrace_trainer.torch_learner.model.head_tail import Tail
from headrace_trainer.torch_learner.model.policy import Policy
from tests.architectures.catalog import CATALOG
from tests.unit.trainer.test_forward import open_policy, rows

WORDS = 37
TAILS = [Tail(), Tail(scale=0.0625), Tail(cap=5.0)]
Found = dict[str, Tensor]


@pytest.fixture(autouse=True, scope="module")
def small_chunks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head, "CHUNK_BYTES", 4 * WORDS * 5)  # five tokens
        yield


def problem(tokens: int, seed: int, *, bias: bool = False, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(seed)
    module = nn.Linear(8, WORDS, bias=bias)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=draw) * 2
    module.to(dtype)
    hidden = torch.randn(tokens, 8, generator=draw).to(dtype).requires_grad_()
    targets = torch.randint(WORDS, (tokens,), generator=draw)
    temperature = (0.25 + 2 * torch.rand(tokens, generator=draw)).to(dtype)
    return module, hidden, targets, temperature, torch.randn(tokens, generator=draw)


def gradients(module: nn.Module, hidden: Tensor, logprobs: Tensor, entropy: Tensor, upstream: Tensor) -> Found:
    torch.autograd.backward((logprobs * upstream.to(logprobs.dtype)).sum())
    tensors = {"logprobs": logprobs.detach(), "entropy": entropy.detach(), "hidden": hidden.grad}
    tensors |= {name: parameter.grad for name, parameter in module.named_parameters()}
    doubles = {name: tensor.double() for name, tensor in tensors.items() if tensor is not None}
    hidden.grad = None
    module.zero_grad()
    return doubles


def textbook(module: Any, hidden: Tensor, targets: Tensor, temperature: Tensor, upstream: Tensor, tail: Tail) -> Found:
    """Return the values and gradients computed in float64 from all logits at once."""
    exact = nn.Linear(8, WORDS, bias=module.bias is not None).double()
    for mine, textbook_parameter in zip(exact.parameters(), module.parameters(), strict=True):
        mine.data = textbook_parameter.detach().double()
    exact.requires_grad_(module.weight.requires_grad)
    leaf = hidden.detach().double().requires_grad_(hidden.requires_grad)
    raw = exact(leaf) * tail.scale
    logits = raw if tail.cap is None else tail.cap * torch.tanh(raw / tail.cap)
    log = (logits / temperature.double()[:, None]).log_softmax(-1)
    entropy = -(log.exp() * log).sum(-1)
    return gradients(exact, leaf, log[torch.arange(len(log)), targets], entropy, upstream)


def assert_close(actual: Found, expected: Found, rtol: float = 2e-5, atol: float = 2e-5) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=rtol, atol=atol * float(1 + tensor.abs().max()), msg=name)


@settings(max_examples=25, derandomize=True)
@given(
    tokens=st.integers(1, 24),
    seed=st.integers(0, 1000),
    bias=st.booleans(),
    frozen=st.booleans(),
    tail=st.sampled_from(TAILS),
)
def test_chunks_are_the_textbook(tokens: int, seed: int, bias: bool, frozen: bool, tail: Tail) -> None:
    module, hidden, targets, temperature, upstream = problem(tokens, seed, bias=bias)
    module.requires_grad_(not frozen)
    answers = Head(module, tail).logprobs(hidden, targets, temperature)
    assert not answers[1].requires_grad
    tensors = gradients(module, hidden, *answers, upstream)
    assert_close(tensors, textbook(module, hidden, targets, temperature, upstream, tail))
    assert ("weight" in tensors) is not frozen


def at_once(module: Any, tail: Tail, tokens: tuple[Tensor, ...], upstream: Tensor) -> Found:
    """Return the values and gradients of `Head.backward` for the same sum."""
    hidden, targets, temperature = tokens
    parts: list[slice] = []

    def slope(logprobs: Tensor, part: slice) -> Tensor:
        parts.append(part)
        return upstream[part].to(logprobs.dtype)

    logprobs, entropy, gradient = Head(module, tail).backward(hidden, targets, temperature, slope)
    assert [index for part in parts for index in range(len(hidden))[part]] == list(range(len(hidden)))
    tensors: dict[str, Tensor | None] = {"logprobs": logprobs, "entropy": entropy, "hidden": gradient}
    tensors |= {name: parameter.grad for name, parameter in module.named_parameters()}
    doubles = {name: tensor.double() for name, tensor in tensors.items() if tensor is not None}
    module.zero_grad()
    return doubles


@settings(max_examples=25, derandomize=True)
@given(
    tokens=st.integers(1, 24),
    seed=st.integers(0, 1000),
    bias=st.booleans(),
    frozen=st.sampled_from(["nothing", "head", "layers"]),
    tail=st.sampled_from(TAILS),
)
def test_a_gradient_computed_with_the_logits_is_the_textbook(
    tokens: int, seed: int, bias: bool, frozen: str, tail: Tail
) -> None:
    module, hidden, targets, temperature, upstream = problem(tokens, seed, bias=bias)
    module.requires_grad_(frozen != "head")
    hidden.requires_grad_(frozen != "layers")
    gradients = at_once(module, tail, (hidden, targets, temperature), upstream)
    assert_close(gradients, textbook(module, hidden, targets, temperature, upstream, tail))
    assert gradients.keys() >= {"nothing": {"hidden", "weight"}, "head": {"hidden"}, "layers": {"weight"}}[frozen]


def test_a_gradient_computed_with_the_logits_adds_up() -> None:
    module, *tokens, upstream = problem(12, 2, bias=True)
    gradients = at_once(module, Tail(), tuple(tokens), upstream)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    two = at_once(module, Tail(), tuple(tokens), upstream)
    assert_close(
        {name: two[name] - 1 for name in ("weight", "bias")}, {name: gradients[name] for name in ("weight", "bias")}
    )


def test_each_product_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk has one product for its logits and two for their gradients."""
    module, *tokens, upstream = problem(12, 2)
    original, calls = head._Matrix.answer_into, []

    def counting(matrix: Any, buffer: Tensor, part: Tensor) -> None:
        calls.append(len(part))
        original(matrix, buffer, part)

    monkeypatch.setattr(head._Matrix, "answer_into", counting)
    monkeypatch.setattr(head._Matrix, "answer", None)
    at_once(module, Tail(), tuple(tokens), upstream)
    assert calls == [5, 5, 2]


@pytest.mark.parametrize("tail", TAILS)
def test_derivatives_agree_with_differences(tail: Tail) -> None:
    """Compare with torch's numerical gradient check in float64."""
    module, hidden, targets, temperature, _ = problem(7, 3, bias=True, dtype=torch.float64)

    def of(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        inputs = (hidden, weight, bias, targets, temperature, tail, torch.float64, None)
        logprobs: Tensor = head._Chunked.apply(*inputs)[0]  # type: ignore[no-untyped-call]
        return logprobs

    assert torch.autograd.gradcheck(of, (hidden, module.weight, module.bias))


def dropped_last(hidden_NH: Tensor, weight_VH: Tensor) -> Iterator[slice]:
    return iter(list(CHUNKS(hidden_NH, weight_VH))[:-1])


def overlapping(hidden_NH: Tensor, weight_VH: Tensor) -> Iterator[slice]:
    return (slice(max(0, part.start - 1), part.stop) for part in CHUNKS(hidden_NH, weight_VH))


CHUNKS = head._chunks
FAULTS: list[tuple[str, Any]] = [
    ("_chunks", dropped_last),
    ("_chunks", overlapping),
    ("Tail.gradient", lambda self, gradient, answer: gradient),
    ("add_product", lambda total, left, right: total.copy_(left @ right)),
]


@pytest.mark.parametrize("how", ["twice", "at once"])
@pytest.mark.parametrize(("where", "fault"), FAULTS, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, where: str, fault: Any, how: str) -> None:
    def run() -> None:
        module, hidden, targets, temperature, upstream = problem(12, 1, bias=True)
        if how == "twice":
            answers = Head(module, Tail(cap=5.0)).logprobs(hidden, targets, temperature)
            tensors = gradients(module, hidden, *answers, upstream)
        else:
            tensors = at_once(module, Tail(cap=5.0), (hidden, targets, temperature), upstream)
        assert_close(tensors, textbook(module, hidden, targets, temperature, upstream, Tail(cap=5.0)))

    run()
    monkeypatch.setattr(f"headrace_trainer.torch_learner.model.head.{where}", fault)
    with pytest.raises((AssertionError, RuntimeError)):  # wrong numbers, or a chunk that there is no room for
        run()


def test_a_head_of_another_kind_goes_through_its_own_code() -> None:
    """A head with an adapter is also computed in chunks, with gradients for all its parameters."""

    class Adapted(nn.Linear):
        def forward(self, hidden: Tensor) -> Tensor:
            return super().forward(hidden) * 1.0

    plain, hidden, targets, temperature, upstream = problem(12, 4, bias=True)
    module = Adapted(8, WORDS)
    module.load_state_dict(plain.state_dict())
    sizes: list[int] = []
    module.register_forward_pre_hook(lambda _, inputs: sizes.append(len(inputs[0])))
    answers = Head(module, Tail(cap=5.0)).logprobs(hidden, targets, temperature)
    tensors = gradients(module, hidden, *answers, upstream)
    assert_close(tensors, textbook(plain, hidden, targets, temperature, upstream, Tail(cap=5.0)))
    assert max(sizes) == 5


@pytest.mark.parametrize("frozen", [False, True])
def test_bfloat16_is_what_autocast_makes_of_it(frozen: bool) -> None:
    """Products are in bfloat16 and all else is in float32, as under autocast; sums over chunks are in float32."""
    module, hidden, targets, temperature, upstream = problem(23, 5)
    module.requires_grad_(not frozen)
    with torch.autocast("cpu", torch.bfloat16):
        unchunked = gradients(module, hidden, *head.logprobs(module(hidden).float(), targets, temperature), upstream)
        chunked = gradients(module, hidden, *Head(module).logprobs(hidden, targets, temperature), upstream)
        once = at_once(module, Tail(), (hidden, targets, temperature), upstream)
    assert_close(chunked, unchunked, rtol=2e-2, atol=1e-2)
    assert_close(once, chunked, rtol=1e-5, atol=1e-5)


def test_a_table_that_is_the_head_too_gets_both_gradients(base: Path) -> None:
    def of(whole: str | None) -> Found:
        policy, several = open_policy(base), rows(temperature=0.7)
        assert policy.model.get_input_embeddings().weight is policy.model.get_output_embeddings().weight
        policy.head = Head(policy.head.module, policy.head.tail, whole)
        torch.autograd.backward(policy.logprobs(policy.collate(several))[0].sum())
        return {name: p.grad for name, p in policy.parameters.items() if p.grad is not None}

    assert_close(of(None), of("to compare"))


def test_two_runs_are_equal_bit_for_bit(base: Path) -> None:
    def of() -> Found:
        policy = open_policy(base)
        torch.autograd.backward(policy.logprobs(policy.collate(rows()))[0].sum())
        return {name: p.grad for name, p in policy.parameters.items() if p.grad is not None}

    left, right = of(), of()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("packing", ["blocks", "padded"])
def test_an_adapter_on_the_head_is_trained_and_taken_off(base: Path, packing: Any) -> None:
    lora = LoraSettings(rank=4, targets=("q_proj", "lm_head"))
    policy = Policy.open(base, ComputeSettings(device="cpu", packing=packing), lora, seed=1)
    assert policy.head.unchunked_reason is None
    pack = policy.collate(rows())
    torch.autograd.backward(policy.logprobs(pack)[0].sum())
    (up,) = [p for name, p in policy.parameters.items() if "lm_head" in name and "lora_B" in name]
    assert up.grad is not None
    chunked = {name: p.grad for name, p in policy.parameters.items() if p.grad is not None}
    for parameter in policy.parameters.values():
        parameter.grad = None
    policy.head = Head(policy.head.module, policy.head.tail, "to compare")
    torch.autograd.backward(policy.logprobs(pack)[0].sum())
    assert_close(chunked, {name: p.grad for name, p in policy.parameters.items() if p.grad is not None})
    del policy.head
    with torch.no_grad():
        up.copy_(torch.linspace(-1, 1, up.numel()).reshape(up.shape))
    first_N = open_policy(base).logprobs(pack)[0].detach()
    torch.testing.assert_close(policy.reference_logprobs(pack), first_N, atol=2e-6, rtol=0)
    assert (policy.logprobs(pack)[0] - first_N).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("name", "tail"),
    [
        ("Llama", lambda _: Tail()),
        ("Gemma 2", lambda config: Tail(cap=config.final_logit_softcapping)),
        ("Cohere", lambda config: Tail(scale=config.logit_scale)),
        ("Granite", lambda config: Tail(scale=1 / config.logits_scaling)),
        ("Phi", lambda _: Tail()),
        ("Mamba", lambda _: Tail()),
    ],
)
def test_what_the_model_does_with_its_heads_answer_is_found(
    tmp_path: Path, name: str, tail: Callable[[Any], Tail]
) -> None:
    (architecture,) = [entry for entry in CATALOG if entry.name == name]
    compute = ComputeSettings(device="cpu", packing="padded")
    policy = Policy.open(architecture.build(tmp_path), compute, LoraSettings(), 0)
    assert policy.head.unchunked_reason is None
    head_tail, expected_tail = policy.head.tail, tail(policy.model.config)
    assert head_tail.scale == pytest.approx(expected_tail.scale)
    assert head_tail.cap == (None if expected_tail.cap is None else pytest.approx(expected_tail.cap))
    token_ids = np.arange(3, 43, dtype=np.int32)
    mask, zeros = np.arange(40) > 0, np.zeros(40, np.float32)
    pack = policy.collate([Row("", 0, token_ids, mask, zeros, zeros + 0.7, np.float32(0), ~mask)])
    with torch.no_grad():
        logits = forward.logits(policy.model, pack)
        expected = head.logprobs(logits, pack.targets_N, pack.temperature_N)
        torch.testing.assert_close(policy.logprobs(pack), expected, atol=5e-6, rtol=1e-5)


def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        result.logits = result.logits + result.logits.sign()
        return result

    return changed


def beside(original: Callable[..., Any]) -> Callable[..., Any]:
    def changed(*arguments: Any, **named: Any) -> Any:
        original(*arguments, **named)
        return original(*arguments, **named)

    return changed


@pytest.mark.parametrize(("fault", "reason"), [(doubled, "changes the head's output"), (beside, "once for each")])
def test_what_cannot_be_had_in_chunks_is_announced_and_right(base: Path, fault: Any, reason: str) -> None:
    policy = open_policy(base)
    policy.__dict__.pop("head")
    policy.model.forward = fault(policy.model.forward)
    with structlog.testing.capture_logs() as logs:
        assert policy.head.unchunked_reason is not None
    (line,) = logs
    assert (line["event"], line["log_level"]) == ("head_not_chunked", "warning")
    assert reason in line["reason"]
    pack = policy.collate(rows())
    with torch.no_grad():
        expected = head.logprobs(forward.logits(policy.model, pack), pack.targets_N, pack.temperature_N)
        torch.testing.assert_close(policy.logprobs(pack), expected)


def test_the_head_answers_as_before_once_it_was_caught(base: Path) -> None:
    policy = open_policy(base)
    policy.logprobs(policy.collate(rows()))
    assert "forward" not in vars(policy.head.module)
    with pytest.raises(ZeroDivisionError), head.intercept(policy.head.module):
        raise ZeroDivisionError
    assert "forward" not in vars(policy.head.module)


@pytest.mark.parametrize("words", [600, 32_000, 152_000])
def test_a_compiled_chunk_is_hardly_larger_than_its_pass_and_of_few_sizes(words: int) -> None:
    most = head_compiled.CHUNK_BYTES // (2 * words)
    sizes = {tokens: head_compiled.rows_of(tokens, words, torch.bfloat16) for tokens in range(1, 16_385)}
    assert all(rows <= max(1024, 2 * tokens) and rows <= most for tokens, rows in sizes.items())
    assert len(set(sizes.values())) <= 5, "each is compiled"


@pytest.mark.long
@pytest.mark.parametrize(("how", "within"), [("chunked", True), ("whole", False)])
def test_memory_is_bounded_by_chunks(how: str, within: bool) -> None:
    """A child process is measured: logits of 2,048 tokens and 48,000 words take 0.8 GB with gradient; the limit is
    0.4 GB."""
    sizes = ["--tokens", "2048", "--vocabulary", "48000", "--hidden", "8", "--threads", "1", "--how", how]
    command = [sys.executable, "-m", "benchmarks._head_memory", *sizes]
    child = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[3])
    assert (json.loads(child.stdout)["peak_gb"] < 0.4) is within
