"""Attention by tiles is attention, however large a tile is; `test_blocks` compares it under every mask."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import masking_utils

from headrace_trainer.torch_learner.model import blocks, tiles
from headrace_trainer.torch_learner.model.blocks import Block

CAUSAL: dict[str, Any] = {"mask_function": masking_utils.causal_mask_function}
WINDOW: dict[str, Any] = {"mask_function": masking_utils.sliding_window_causal_mask_function(40), "local_size": 40}


def drawn(several: int, heads: int, shared: int, length: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    draw = torch.Generator().manual_seed(length)
    shapes = ((several, count, length, 8) for count in (heads, shared, shared))
    return [torch.randn(shape, generator=draw, dtype=dtype).requires_grad_() for shape in shapes]


def expected(q: Any, k: Any, v: Any, mask_args: dict[str, Any], scale: float | None = None) -> torch.Tensor:
    (block,) = blocks.of(q.shape[2], mask_args) if mask_args is CAUSAL else (None,)
    at = torch.arange(q.shape[2])
    seen = (at[None] <= at[:, None]) if block else (at[None] <= at[:, None]) & (at[:, None] - at[None] < 40)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)


@pytest.fixture(params=[1 << 6, 1 << 10, 1 << 14, 1 << 20])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """From one query's scores to those of everything."""
    monkeypatch.setattr(tiles, "TILE", request.param)
    monkeypatch.setattr(tiles, "ROWS_MIN", 2)
    monkeypatch.setattr(tiles, "_buffers", tiles._Buffers())
    return int(request.param)


@pytest.mark.usefixtures("tile")
@pytest.mark.parametrize("mask_args", [CAUSAL, WINDOW], ids=["causal", "window"])
@pytest.mark.parametrize("length", [1, 31, 300])
@pytest.mark.parametrize(("heads", "shared"), [(6, 6), (6, 2), (6, 1)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_answers_and_gradients_do_not_depend_on_tiles(
    mask_args: dict[str, Any], length: int, heads: int, shared: int, scale: float | None
) -> None:
    q, k, v = inputs = drawn(3, heads, shared, length)
    weights = torch.randn(q.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    output, expected_output = (
        tiles.attend(q, k, v, blocks.of(length, mask_args), scale),
        expected(q, k, v, mask_args, scale),
    )
    torch.testing.assert_close(output, expected_output, atol=1e-12, rtol=1e-12)
    tile_gradients, expected_gradients = (
        torch.autograd.grad((answer * weights).sum(), inputs) for answer in (output, expected_output)
    )
    for tile_gradient, other in zip(tile_gradients, expected_gradients, strict=True):
        torch.testing.assert_close(tile_gradient, other, atol=1e-11, rtol=1e-11)


def test_no_tile_is_larger_than_asked(tile: int) -> None:
    for length, groups in ((1, 1), (17, 4), (900, 1), (900, 8)):
        for mask_args in (CAUSAL, WINDOW):
            cut = tuple(tiles._finer(blocks.of(length, mask_args), groups))
            assert [at for block in cut for at in range(block.start, block.stop)] == [*range(length)], "each query once"
            for block in cut:
                columns = block.last - block.first
                assert block.queries * groups * columns <= max(tile, max(tiles.ROWS_MIN, groups) * columns)
                assert block.queries * groups <= max(tiles.ROWS, groups)
    assert tile


@pytest.mark.parametrize("size", [1e-3, 1.0, 30.0, 1e3])
def test_scores_of_any_size_are_as_near_as_with_the_kernel_of_torch(size: float) -> None:
    q, k, v = (tensor.detach() for tensor in drawn(1, 2, 2, 64, torch.float32))
    # One channel that is the same for all keys moves all scores, and no share.
    q = torch.cat([q * size, q.new_full((1, 2, 64, 1), 300.0)], -1)
    k = torch.cat([k, k.new_ones((1, 2, 64, 1))], -1)
    expected_output = expected(q.double(), k.double(), v.double(), CAUSAL)
    tile_error, torch_error = (
        float((output - expected_output).abs().max())
        for output in (tiles.attend(q, k, v, blocks.of(64, CAUSAL), None), expected(q, k, v, CAUSAL))
    )
    assert tile_error <= 4 * torch_error + 1e-6


def test_threads_do_not_share_a_room() -> None:
    """Each computes on its own numbers while others do, again and again."""
    inputs = [drawn(2, 4, 2, length) for length in (150, 151, 152, 153)]
    expected_output = [expected(q, k, v, CAUSAL) for q, k, v in inputs]
    wrong: list[int] = []

    def compute(number: int) -> None:
        q, k, v = inputs[number]
        for _ in range(20):
            output = tiles.attend(q, k, v, blocks.of(150 + number, CAUSAL), None)
            if not torch.allclose(output, expected_output[number], atol=1e-12):
                wrong.append(number)

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_half_types_and_autocast_are_left_to_torch() -> None:
    assert tiles.takes(torch.ones(1))
    assert not tiles.takes(torch.ones(1, dtype=torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        assert not tiles.takes(torch.ones(1))


def planted_off_by_one(cut: tuple[Block, ...]) -> tuple[Block, ...]:
    """Each query sees the key after its own too."""
    return tuple(Block(block.start, block.stop, block.first + 1, block.last + 1, block.mask) for block in cut)


def test_a_shifted_block_is_noticed() -> None:
    q, k, v = drawn(1, 2, 2, 40)
    k2, v2 = (torch.cat([tensor, tensor[:, :, :1]], 2) for tensor in (k, v))
    cut = planted_off_by_one(blocks.of(40, CAUSAL))
    output = tiles.attend(q, k2, v2, cut, None)
    assert not torch.allclose(output, expected(q, k, v, CAUSAL), atol=1e-3)
