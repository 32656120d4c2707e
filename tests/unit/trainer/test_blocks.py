"""Attention in blocks of queries equals attention: outputs, gradients, and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils

from headrace_trainer.torch_learner.model import attention, blocks, tiles
from tests.unit.trainer.test_forward import open_policy, rows

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


def drawn(heads: int, shared: int, width: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    draw, total = torch.Generator().manual_seed(3), sum(LENGTHS)
    shapes = ((1, heads, total, 8), (1, shared, total, 8), (1, shared, total, width))
    return [torch.randn(shape, generator=draw, dtype=dtype).requires_grad_() for shape in shapes]


def textbook(q: Any, k: Any, v: Any, sees: Any, softcap: float | None = None, s_aux: Any = None) -> torch.Tensor:
    """One sequence after the other, all scores at once, keys copied for each head."""
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
        monkeypatch.setattr(tiles, "takes", lambda _: False)
        how = "plain"
    more = dict(HOWS[how])
    q, k, v = inputs = drawn(heads, shared, width)
    if "s_aux" in more:
        more["s_aux"] = torch.linspace(-1, 1, heads, dtype=torch.float64).requires_grad_()
    leaves = [*inputs, *([more["s_aux"]] if "s_aux" in more else [])]
    with attention.sequences(attention.bounds_of(LENGTHS)):
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
    """The largest tensor that any operation answers with, in numbers."""

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
    cut = blocks.of(4096, {"mask_function": masking_utils.sliding_window_causal_mask_function(300), "local_size": 300})
    assert [(block.start, block.stop) for block in cut] == [(at, at + 256) for at in range(0, 4096, 256)]
    assert max(block.last - block.first for block in cut) == 256 + 299
    masks = {id(block.mask) for block in cut}
    assert len(masks) <= 4, "the same for all of a window's blocks"


def test_what_is_plainly_causal_is_not_cut() -> None:
    long_window = {"mask_function": masking_utils.sliding_window_causal_mask_function(900), "local_size": 900}
    (block,) = blocks.of(800, long_window)
    assert block == blocks.Block(0, 800, 0, 800, None)
    first, *rest = blocks.of(2000, long_window)
    assert (first.start, first.stop, first.mask) == (0, 768, None), "up to the window's width there is no mask"
    assert all(remainder.mask is not None for remainder in rest)


class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_heads_that_share_keys_get_no_copies_and_equal_sequences_one_call() -> None:
    q, k, v = (torch.randn(1, heads, 60, 8, requires_grad=True) for heads in (4, 2, 2))
    with attention.sequences((0, 20, 40, 60)), Copies() as copies:
        seen = attention._mask_object(q_length=60, mask_function=masking_utils.causal_mask_function)
        attention.attend(None, q, k, v, seen)[0].sum().backward()  # type: ignore[no-untyped-call]
    assert not [name for name in copies.names if "repeat" in name or name == "cat"]
    assert copies.names.count("bmm") == 2 + 5, "products of the forward and the backward pass"


@pytest.mark.parametrize("bounds", [(0, 20), (0, 5, 10, 20)])
def test_rows_of_a_rectangle_are_computed_each(bounds: tuple[int, ...]) -> None:
    q, k, v = (torch.randn(3, heads, 20, 8) for heads in (4, 2, 2))
    with attention.sequences(bounds):
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
