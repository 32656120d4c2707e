"""Attention of a whole row by GPU kernels: their arguments, and equality with the model's mask.

The kernels themselves run only on a GPU (`make bench NAME=gpu` compares them with float64). Here an oracle that
computes the same function takes their place.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import masking_utils

from headrace_trainer.torch_learner.model import attention, attention_results, flash
from headrace_trainer.torch_learner.model.flash import KernelResult, Part

WIDTH = 16
CAUSAL: dict[str, Any] = {"mask_function": masking_utils.causal_mask_function}


def window(size: int) -> dict[str, Any]:
    return {"mask_function": masking_utils.sliding_window_causal_mask_function(size), "local_size": size}


def chunks(size: int) -> dict[str, Any]:
    start = torch.zeros(1, dtype=torch.int64)
    return {"mask_function": masking_utils.chunked_causal_mask_function(size, start), "local_size": size}


class Oracle:
    """Computes scores of all pairs in float64, and counts its calls."""

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
    """Compute attention of one sequence, `[tokens, heads, width]`."""
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
        assert flash.reach(longest, CAUSAL) == longest
        assert flash.reach(longest, window(7)) == min(7, longest)
        assert flash.reach(longest, chunks(7)) == (longest if longest <= 7 else None)
        assert flash.reach(longest, {**window(7), "allow_is_causal_skip": False}) is None


def test_a_mask_that_lies_on_another_device_is_none_of_ours() -> None:
    def looks_up(*_: Any) -> Tensor:
        raise RuntimeError("Expected all tensors to be on the same device")

    assert flash.reach(20, {"mask_function": looks_up, "local_size": 7}) is None


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
    answer = checkpoint(layer, *leaves, use_reentrant=False, context_fn=attention_results.contexts)
    again = torch.autograd.grad(answer.sum(), leaves)
    assert len(oracle.calls) == 2
    torch.testing.assert_close(again, plain)
