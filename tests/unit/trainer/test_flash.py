"""Tests of attention over packed rows: the arguments of GPU kernels, the mask, and attention in blocks of queries.

The kernels run only on a GPU (`make bench NAME=gpu` compares them with float64); an oracle for the same function
replaces them here. Attention in blocks has the outputs and gradients of attention with less memory.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils

from headrace_trainer.torch_learner.model import attention, blocks, flash, recomputing, tiles
from headrace_trainer.torch_learner.model.flash import KernelResult, Part
from tests.unit.trainer.test_forward import open_policy, rows

WIDTH = 16
CAUSAL: dict[str, Any] = {"mask_function": masking_utils.causal_mask_function}


def window(size: int) -> dict[str, Any]:
    return {"mask_function": masking_utils.sliding_window_causal_mask_function(size), "local_size": size}


def chunks(size: int) -> dict[str, Any]:
    start = torch.zeros(1, dtype=torch.int64)
    return {"mask_function": masking_utils.chunked_causal_mask_function(size, start), "local_size": size}


class Oracle:
    """Substitute for the kernel that computes all scores in float64 and counts its calls."""

    def __init__(self) -> None:
        self.calls: list[Part] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float | None) -> KernelResult:
        self.calls.append(part)
        return self._answer(query, key, value, part, scale), (torch.zeros(1), None)

    def backward(
        self,
        of: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        result: KernelResult,
        part: Part,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
            answer = self._answer(leaves[0], leaves[1], leaves[2], part, scale)
            torch.testing.assert_close(answer, result[0])
            of_query, of_key, of_value = torch.autograd.grad(answer, leaves, of)
        return of_query, of_key, of_value

    @staticmethod
    def _answer(query: Tensor, key: Tensor, value: Tensor, part: Part, scale: float | None) -> Tensor:
        if part.bounds is not None:
            assert part.bounds.tolist() == [0, *torch.tensor(part.lengths).cumsum(0).tolist()]
        three = (torch.split(tensor, list(part.lengths)) for tensor in (query, key, value))
        return torch.cat([alone(q, k, v, part.window, scale) for q, k, v in zip(*three, strict=True)])


def alone(query: Tensor, key: Tensor, value: Tensor, seen: int | None, scale: float | None) -> Tensor:
    """Return the attention of one sequence, `[tokens, heads, width]`."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * (query.shape[2] ** -0.5 if scale is None else scale)
    at = torch.arange(len(query))
    hidden = at[None] > at[:, None]
    if seen is not None:
        hidden |= at[None] <= at[:, None] - seen
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)


def row(lengths: list[int], mask_args: dict[str, Any], *, cudnn: bool) -> flash.Row | None:
    return flash.row_of(attention.bounds_of(lengths), mask_args, torch.device("cpu"), cudnn=cudnn)


def drawn(tokens: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, tokens, WIDTH, generator=draw, dtype=torch.float64) for heads in (4, 2, 2)]


@pytest.mark.parametrize("cudnn", [False, True])
@pytest.mark.parametrize("mask_args", [CAUSAL, window(5), window(200)], ids=["causal", "narrow", "wide"])
@pytest.mark.parametrize("lengths", [[7], [9, 30, 30, 1], [30, 9]])
def test_a_row_answers_as_its_sequences_alone(
    lengths: list[int], mask_args: dict[str, Any], cudnn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "LONG", 8)
    monkeypatch.setattr(flash, "STEP", 10)
    plan = row(lengths, mask_args, cudnn=cudnn)
    assert plan is not None
    query, key, value = (tensor.requires_grad_() for tensor in drawn(sum(lengths)))
    answer = flash.attend(query, key, value, plan, 0.3, (Oracle(), Oracle()))
    local = mask_args.get("local_size")
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    expected = [alone(q[a:b], k[a:b], v[a:b], local, 0.3) for a, b in pairwise(attention.bounds_of(lengths))]
    torch.testing.assert_close(answer[0], torch.cat(expected))
    upstream = torch.randn(answer.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    gradients = torch.autograd.grad(answer, (query, key, value), upstream)
    expected_gradients = torch.autograd.grad(torch.cat(expected), (query, key, value), upstream[0])
    torch.testing.assert_close(gradients, expected_gradients)


def test_a_mask_is_told_by_what_it_shows() -> None:
    for longest in (1, 6, 7, 8, 13, 14, 15, 40):
        assert flash.window_of(longest, CAUSAL) == longest
        assert flash.window_of(longest, window(7)) == min(7, longest)
        assert flash.window_of(longest, chunks(7)) == (longest if longest <= 7 else None)
        assert flash.window_of(longest, {**window(7), "allow_is_causal_skip": False}) is None


def test_a_mask_that_lies_on_another_device_is_none_of_ours() -> None:
    def looks_up(*_: Any) -> Tensor:
        raise RuntimeError("Expected all tensors to be on the same device")

    assert flash.window_of(20, {"mask_function": looks_up, "local_size": 7}) is None


def test_short_neighbours_are_one_call_and_long_ones_have_few_shapes() -> None:
    lengths = [5000, 4700, 4609, 2048, 900, 30, 1024, 1500]
    plan = row(lengths, CAUSAL, cudnn=True)
    assert plan is not None
    assert [part.lengths for part in plan.parts] == [(5000, 4700), (4609,), (2048,), (900, 30, 1024), (1500,)]
    assert [part.rounded_length for part in plan.parts if part.bounds is None] == [5120, 5120, 2048, 1536]
    flash_only = row(lengths, CAUSAL, cudnn=False)
    assert flash_only is not None
    assert [part.lengths for part in flash_only.parts] == [tuple(lengths)]
    windowed = row(lengths, window(100), cudnn=True)
    assert windowed is not None
    assert [part.window for part in windowed.parts] == [100]


def test_what_is_added_to_a_rectangle_is_taken_off_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "STEP", 8)
    for lengths in ((8, 8), (7, 6), (3,)):
        part = Part(lengths, None, None)
        tensor = torch.arange(sum(lengths) * 6.0).reshape(sum(lengths), 2, 3)
        rectangle = flash._rectangle(tensor, part)
        assert rectangle.shape == (len(lengths), 2, 8, 3)
        assert float(rectangle.sum()) == float(tensor.sum())
        torch.testing.assert_close(flash._strip(rectangle, part), tensor)


def test_recomputed_layers_ask_the_kernel_once() -> None:
    lengths = [9, 4]
    plan = row(lengths, CAUSAL, cudnn=False)
    assert plan is not None
    oracle = Oracle()
    leaves = [tensor.requires_grad_() for tensor in drawn(sum(lengths))]

    def layer(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        first = flash.attend(query.sin(), key, value, plan, None, (oracle, oracle))
        return flash.attend(first.transpose(1, 2).sin(), key, value, plan, None, (oracle, oracle))

    plain = torch.autograd.grad(layer(*leaves).sum(), leaves)
    assert len(oracle.calls) == 2
    oracle.calls.clear()
    answer = checkpoint(layer, *leaves, use_reentrant=False, context_fn=recomputing.contexts)
    again = torch.autograd.grad(answer.sum(), leaves)
    assert len(oracle.calls) == 2
    torch.testing.assert_close(again, plain)


LENGTHS = (23, 23, 9, 1, 14)
MASKS: dict[str, tuple[Any, Any]] = {
    "causal": (masking_utils.causal_mask_function, lambda q, k: k <= q),
    "window": (masking_utils.sliding_window_causal_mask_function(6), lambda q, k: (k <= q) & (q - k < 6)),
    "chunks": (
        masking_utils.chunked_causal_mask_function(5, torch.zeros(1, dtype=torch.long)),
        lambda q, k: (k <= q) & (q // 5 == k // 5),
    ),
    "prefix": (
        masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k < 3),
        lambda q, k: (k <= q) | (k < 3),
    ),
}
HOWS: dict[str, dict[str, Any]] = {"plain": {}, "cap": {"softcap": 2.0}, "aux": {"s_aux": None}}


def mask_args_of(name: str) -> dict[str, Any]:
    if name == "causal":
        return {"mask_function": MASKS[name][0]}
    return {"mask_function": MASKS[name][0], "local_size": 5, "allow_is_causal_skip": name != "prefix"}


def drawn_blocks(heads: int, shared: int, width: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    draw, total = torch.Generator().manual_seed(3), sum(LENGTHS)
    shapes = ((1, heads, total, 8), (1, shared, total, 8), (1, shared, total, width))
    return [torch.randn(shape, generator=draw, dtype=dtype).requires_grad_() for shape in shapes]


def textbook(q: Any, k: Any, v: Any, sees: Any, softcap: float | None = None, s_aux: Any = None) -> torch.Tensor:
    """Return the attention of each sequence in turn, with all scores at once and the keys repeated for each head."""
    groups, start, outputs = q.shape[1] // k.shape[1], 0, []
    for length in LENGTHS:
        span = slice(start, start + length)
        keys, values = (tensor[:, :, span].repeat_interleave(groups, 1) for tensor in (k, v))
        scores = q[:, :, span] @ keys.transpose(2, 3) / q.shape[3] ** 0.5
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        at = torch.arange(length)
        exps = scores.exp() * sees(at[:, None], at[None])
        below = exps.sum(-1, keepdim=True) + (0.0 if s_aux is None else s_aux.exp()[None, :, None, None])
        outputs.append(exps / below @ values)
        start += length
    return torch.cat(outputs, 2).transpose(1, 2)


@pytest.mark.parametrize("queries", [4, 256])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("how", [*HOWS, "torch's"])
@pytest.mark.parametrize(("heads", "shared", "width"), [(4, 2, 8), (2, 2, 8), (4, 1, 5)])
def test_answers_and_gradients_are_those_of_all_scores_at_once(
    monkeypatch: pytest.MonkeyPatch, queries: int, mask: str, how: str, heads: int, shared: int, width: int
) -> None:
    monkeypatch.setattr(blocks, "QUERIES", queries)
    if how == "torch's":  # as for types that are no CPU's, and on GPUs that flash attention does not take
        monkeypatch.setattr(tiles, "supports", lambda _: False)
        how = "plain"
    more = dict(HOWS[how])
    q, k, v = inputs = drawn_blocks(heads, shared, width)
    if "s_aux" in more:
        more["s_aux"] = torch.linspace(-1, 1, heads, dtype=torch.float64).requires_grad_()
    leaves = [*inputs, *([more["s_aux"]] if "s_aux" in more else [])]
    with attention.row_of_sequences(attention.bounds_of(LENGTHS)):
        seen = attention._mask_object(q_length=sum(LENGTHS), kv_length=sum(LENGTHS), **mask_args_of(mask))
    output, _ = attention.attend(None, q, k, v, seen, **more)
    expected = textbook(q, k, v, MASKS[mask][1], **more)
    # The scores of attention by hand are in float32, as in the models' own code.
    near = 1e-10 if how == "plain" else 2e-6
    torch.testing.assert_close(output, expected, atol=near, rtol=near)
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    block_gradients, textbook_gradients = (
        torch.autograd.grad((answer * weights).sum(), leaves) for answer in (output, expected)
    )
    for block_gradient, other in zip(block_gradients, textbook_gradients, strict=True):
        torch.testing.assert_close(block_gradient, other, atol=10 * near, rtol=10 * near)


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the number of elements of the largest tensor that any operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // max(1, tensor.element_size()))
        return output


@pytest.mark.parametrize("how", [{}, {"softcap": 2.0}], ids=["fused", "by hand"])
@pytest.mark.parametrize("mask", ["causal", "window"])
def test_no_tensor_of_all_pairs_is_made(monkeypatch: pytest.MonkeyPatch, how: dict[str, Any], mask: str) -> None:
    monkeypatch.setattr(blocks, "QUERIES", 16)
    monkeypatch.setattr(tiles, "TILE", 1 << 14)
    monkeypatch.setattr(tiles, "ROWS_MIN", 16)
    monkeypatch.setattr(tiles, "_buffers", tiles._Buffers())
    length = 1024
    q, k, v = (torch.randn(1, heads, length, 4, requires_grad=True) for heads in (2, 1, 1))
    with Largest() as largest:
        seen = attention._mask_object(q_length=length, **mask_args_of(mask))
        attention.attend(None, q, k, v, seen, **how)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert largest.elements < length**2 / 10


def test_a_window_costs_what_it_shows() -> None:
    cut = blocks.divide(
        4096, {"mask_function": masking_utils.sliding_window_causal_mask_function(300), "local_size": 300}
    )
    assert [(block.start, block.stop) for block in cut] == [(at, at + 256) for at in range(0, 4096, 256)]
    assert max(block.last - block.first for block in cut) == 256 + 299
    masks = {id(block.mask) for block in cut}
    assert len(masks) <= 4, "the same for all of a window's blocks"


def test_what_is_plainly_causal_is_not_cut() -> None:
    long_window = {"mask_function": masking_utils.sliding_window_causal_mask_function(900), "local_size": 900}
    (block,) = blocks.divide(800, long_window)
    assert block == blocks.Block(0, 800, 0, 800, None)
    first, *rest = blocks.divide(2000, long_window)
    assert (first.start, first.stop, first.mask) == (0, 768, None), "up to the window's width there is no mask"
    assert all(remainder.mask is not None for remainder in rest)


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the name of every operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_heads_that_share_keys_get_no_copies_and_equal_sequences_one_call() -> None:
    q, k, v = (torch.randn(1, heads, 60, 8, requires_grad=True) for heads in (4, 2, 2))
    with attention.row_of_sequences((0, 20, 40, 60)), Copies() as copies:
        seen = attention._mask_object(q_length=60, mask_function=masking_utils.causal_mask_function)
        attention.attend(None, q, k, v, seen)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert not [name for name in copies.names if "repeat" in name or name == "cat"]
    assert copies.names.count("bmm") == 2 + 5, "products of the forward and the backward pass"


@pytest.mark.parametrize("bounds", [(0, 20), (0, 5, 10, 20)])
def test_rows_of_a_rectangle_are_computed_each(bounds: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(3, heads, 20, 8) for heads in (4, 2, 2))
    with attention.row_of_sequences(bounds):
        seen = attention._mask_object(q_length=20, mask_function=masking_utils.causal_mask_function)
    output, _ = attention.attend(None, q, k, v, seen)
    for row in range(3):
        alone, _ = attention.attend(None, q[row, None], k[row, None], v[row, None], seen)
        torch.testing.assert_close(output[row, None], alone)


def test_what_is_recomputed_is_everything_but_attention(base: Path) -> None:
    calls: dict[bool, list[str]] = {}
    gradients = {}
    for checkpointing in (False, True):
        policy = open_policy(base, gradient_checkpointing=checkpointing)
        with Copies() as copies:
            policy.logprobs(policy.collate(rows()))[0].sum().backward()  # type: ignore[no-untyped-call]
        calls[checkpointing] = copies.names
        gradients[checkpointing] = {n: p.grad for n, p in policy.parameters.items() if p.grad is not None}
    attended, products = "exp2", "mm"
    assert calls[True].count(attended) == calls[False].count(attended) > 0
    assert calls[True].count(products) > calls[False].count(products)
    for name, plain in gradients[False].items():
        torch.testing.assert_close(gradients[True][name], plain, atol=1e-6, rtol=1e-5)
