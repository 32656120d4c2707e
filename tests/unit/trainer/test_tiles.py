"""Tests of attention in tiles of any size, of the memory limit of sequences, and of RMS norms with their own gradient.

`test_flash.py` compares attention under every mask. The RMS norms have the values of the definition, and replace only
modules whose own code computes the same.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs
from torch import Tensor, nn
from torch.nn import functional
from transformers import masking_utils

from headrace_runtime.errors import SettingError
from headrace_trainer.experiences import admission
from headrace_trainer.settings import ComputeSettings, LoraSettings, TrainerSettings
from headrace_trainer.torch_learner.model import blocks, devices, norms, sequence_bound, tiles
from headrace_trainer.torch_learner.model.blocks import Block
from headrace_trainer.torch_learner.model.norms import NormFormula
from headrace_trainer.torch_learner.model.policy import Policy
from tests.architectures.catalog import CATALOG
from tests.support import tiny_model
from tests.unit.trainer.test_forward import open_policy, rows

CAUSAL: dict[str, Any] = {"mask_function": masking_utils.causal_mask_function}
WINDOW: dict[str, Any] = {"mask_function": masking_utils.sliding_window_causal_mask_function(40), "local_size": 40}


def drawn(several: int, heads: int, shared: int, length: int, dtype: torch.dtype = torch.float64) -> list[Any]:
    draw = torch.Generator().manual_seed(length)
    shapes = ((several, count, length, 8) for count in (heads, shared, shared))
    return [torch.randn(shape, generator=draw, dtype=dtype).requires_grad_() for shape in shapes]


def expected(q: Any, k: Any, v: Any, mask_args: dict[str, Any], scale: float | None = None) -> torch.Tensor:
    (block,) = blocks.divide(q.shape[2], mask_args) if mask_args is CAUSAL else (None,)
    at = torch.arange(q.shape[2])
    seen = (at[None] <= at[:, None]) if block else (at[None] <= at[:, None]) & (at[:, None] - at[None] < 40)
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scale, enable_gqa=True)


@pytest.fixture(params=[1 << 6, 1 << 10, 1 << 14, 1 << 20])
def tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Set the tile size to one query's scores up to the scores of all queries, and return it."""
    monkeypatch.setattr(tiles, "TILE", request.param)
    monkeypatch.setattr(tiles, "ROWS_MIN", 2)
    monkeypatch.setattr(tiles, "_buffers", tiles._Buffers())
    return int(request.param)


def test_the_largest_tile_comes_first_so_that_its_memory_holds_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 1 << 6)
    buffers = tiles._Buffers()
    monkeypatch.setattr(tiles, "_buffers", buffers)
    product, sizes = buffers.product, set()

    def noted(left: Tensor, right: Tensor, buffer: int) -> Tensor:
        result = product(left, right, buffer)
        sizes.add(buffers._numbers.numel())
        return result

    monkeypatch.setattr(buffers, "product", noted)
    q, k, v = drawn(1, 2, 1, 320)
    torch.autograd.grad(tiles.attend(q, k, v, blocks.divide(320, CAUSAL), None).sum(), [q, k, v])
    assert len(sizes) == 1, "the memory of a tile is allocated once"


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
        tiles.attend(q, k, v, blocks.divide(length, mask_args), scale),
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
            cut = tuple(tiles._finer(blocks.divide(length, mask_args), groups))
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
        for output in (tiles.attend(q, k, v, blocks.divide(64, CAUSAL), None), expected(q, k, v, CAUSAL))
    )
    assert tile_error <= 4 * torch_error + 1e-6


def test_threads_do_not_share_a_room() -> None:
    """Several threads compute attention at the same time, repeatedly, and must not overwrite each other's buffers."""
    inputs = [drawn(2, 4, 2, length) for length in (150, 151, 152, 153)]
    expected_output = [expected(q, k, v, CAUSAL) for q, k, v in inputs]
    wrong: list[int] = []

    def compute(number: int) -> None:
        q, k, v = inputs[number]
        for _ in range(20):
            output = tiles.attend(q, k, v, blocks.divide(150 + number, CAUSAL), None)
            if not torch.allclose(output, expected_output[number], atol=1e-12):
                wrong.append(number)

    threads = [threading.Thread(target=compute, args=(number,)) for number in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_half_types_and_autocast_are_left_to_torch() -> None:
    assert tiles.supports(torch.ones(1))
    assert not tiles.supports(torch.ones(1, dtype=torch.bfloat16))
    with torch.autocast("cpu", torch.bfloat16):
        assert not tiles.supports(torch.ones(1))


def planted_off_by_one(cut: tuple[Block, ...]) -> tuple[Block, ...]:
    """Injected fault: each query also attends to the key after its own."""
    return tuple(Block(block.start, block.stop, block.first + 1, block.last + 1, block.mask) for block in cut)


def test_a_shifted_block_is_noticed() -> None:
    q, k, v = drawn(1, 2, 2, 40)
    k2, v2 = (torch.cat([tensor, tensor[:, :, :1]], 2) for tensor in (k, v))
    cut = planted_off_by_one(blocks.divide(40, CAUSAL))
    output = tiles.attend(q, k2, v2, cut, None)
    assert not torch.allclose(output, expected(q, k, v, CAUSAL), atol=1e-3)


GB = 1_000_000_000


def test_what_a_token_costs_does_not_depend_on_the_sequence(base: Path) -> None:
    """The memory of a pass is linear in the length, so a sequence of 48 tokens predicts a long one."""
    policy = open_policy(base)
    short, _, _, long = (sequence_bound.token_bytes(policy, row, recomputed=False) for row in rows())
    assert 0.9 < long / short < 1.1
    assert long > 0


def test_recomputed_layers_keep_less(tmp_path: Path) -> None:
    tiny_model.build(tmp_path, layers=8)
    policy, row = open_policy(tmp_path, gradient_checkpointing=True), rows()[3]
    assert (
        sequence_bound.token_bytes(policy, row, recomputed=True)
        < sequence_bound.token_bytes(policy, row, recomputed=False) / 1.5
    )
    assert policy.model.training, "it is put back"


def test_tokens_are_what_is_left_of_the_memory() -> None:
    chunks = 4 * (64 << 20)
    assert sequence_bound.tokens(10 * GB, 0, 1000.0) == pytest.approx((8 * GB - chunks) / 1000, abs=1)
    assert sequence_bound.tokens(10 * GB, 100_000_000, 1000.0) == pytest.approx((6.4 * GB - chunks) / 1000, abs=1)
    assert sequence_bound.tokens(1 * GB, 100_000_000, 1000.0) == 0


def test_the_bound_is_the_smallest_of_context_memory_and_queue(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_bound, "free_bytes", lambda _: GB)
    plenty = open_policy(base).sequence_bound()
    monkeypatch.setattr(sequence_bound, "free_bytes", lambda _: GB // 2)
    assert 0 < open_policy(base).sequence_bound() < plenty
    settings = TrainerSettings(base="x", memory={"queue_tokens": 5000})
    assert admission.limits_of(settings, 320, 9000).sequence_tokens == 5000
    assert admission.limits_of(settings, 320, 300).sequence_tokens == 300
    named = TrainerSettings(base="x", memory={"sequence_tokens": 40})
    assert admission.limits_of(named, 320, 300).sequence_tokens == 40


def test_no_room_at_all_is_a_setting_error(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sequence_bound, "free_bytes", lambda _: 1000)
    with pytest.raises(SettingError, match=r"sequence_tokens = 'none': 0\.0 GB have room for 0 tokens"):
        open_policy(base).sequence_bound()


def test_a_container_has_less_than_its_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit, used = tmp_path / "max", tmp_path / "current"
    monkeypatch.setattr(sequence_bound, "_LIMITS", (limit,))
    monkeypatch.setattr(sequence_bound, "_USED", (used,))
    cpu = torch.device("cpu")
    machine = sequence_bound.free_bytes(cpu)
    limit.write_text("3000000\n")
    used.write_text("1000000\n")
    assert sequence_bound.free_bytes(cpu) == 2_000_000
    limit.write_text("max\n")
    assert machine is None or (sequence_bound.free_bytes(cpu) or 0) > 2_000_000


@pytest.mark.parametrize("able", [True, False])
def test_auto_is_what_the_device_multiplies(base: Path, monkeypatch: pytest.MonkeyPatch, able: bool) -> None:
    monkeypatch.setattr(devices, "multiplies_bfloat16", lambda _: able)
    cpu = torch.device("cpu")
    assert devices.resolve_types(ComputeSettings(dtype="auto"), cpu).dtype == ("bfloat16" if able else "float32")
    with capture_logs() as logs:
        assert devices.resolve_types(ComputeSettings(dtype="bfloat16"), cpu).dtype == "bfloat16"
    assert [line["event"] for line in logs] == ([] if able else ["bfloat16_is_slow"])
    exact, automatic = open_policy(base), open_policy(base, dtype="auto")
    pair = [each.logprobs(each.collate(rows()))[0] for each in (exact, automatic)]
    assert torch.equal(*pair) != able


WIDTH = 12


class PlainRMSNorm(nn.Module):
    shift = 0.0

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight + self.shift) * (x * scale)


class ShiftedRMSNorm(PlainRMSNorm):
    shift = 1.0


def results(module: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    leaf = x.detach().clone().requires_grad_()
    module.zero_grad()
    out = module(leaf)
    torch.autograd.backward((out * upstream).sum())
    assert leaf.grad is not None
    gradients = {"out": out.detach(), "x": leaf.grad}
    gradients |= {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {name: tensor.double() for name, tensor in gradients.items()}


def assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        size = float(tensor.abs().max())
        torch.testing.assert_close(actual[name], tensor, rtol=1e-5, atol=2e-6 * size + 1e-12, msg=name)


@settings(max_examples=40, derandomize=True)
@given(
    rows=st.integers(1, 9),
    heads=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 1000),
    size=st.sampled_from([1e-4, 1.0, 1e3]),
    kind=st.sampled_from([PlainRMSNorm, ShiftedRMSNorm]),
    turned=st.booleans(),
)
def test_it_is_the_textbook(
    rows: int, heads: int, seed: int, size: float, kind: type[PlainRMSNorm], turned: bool
) -> None:
    draw = torch.Generator().manual_seed(seed)
    shape = (1, rows, heads, WIDTH) if heads else (1, rows, WIDTH)
    x, upstream = torch.randn(shape, generator=draw) * size, torch.randn(shape, generator=draw)
    if turned and heads:
        upstream = upstream.transpose(1, 2).contiguous().transpose(1, 2)  # as attention hands it back
    exact, fused = kind().double(), kind()
    fused.weight.data = torch.randn(WIDTH, generator=draw)
    exact.weight.data = fused.weight.data.double()
    assert norms.fuse(fused) == 1
    assert_close(results(fused, x, upstream), results(exact, x.double(), upstream.double()))


@pytest.mark.parametrize("weight", [True, False])
def test_what_is_frozen_has_no_gradient(weight: bool) -> None:
    module = PlainRMSNorm()
    norms.fuse(module)
    module.weight.requires_grad_(weight)
    x = torch.randn(3, WIDTH, requires_grad=not weight)
    torch.autograd.backward(module(x).sum())
    assert (module.weight.grad is not None) is weight
    assert (x.grad is None) is weight


class CentredRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


class GatedRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x) if gate is None else super().forward(x) * gate


class EpsilonOutsideRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.variance_epsilon)


class BoundedRMSNorm(PlainRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-1.5, 1.5)


class OtherName(PlainRMSNorm):
    pass


@pytest.mark.parametrize("kind", [CentredRMSNorm, GatedRMSNorm, EpsilonOutsideRMSNorm, BoundedRMSNorm, OtherName])
def test_what_computes_something_else_keeps_its_own_code(kind: type[PlainRMSNorm]) -> None:
    module = kind()
    assert norms.fuse(module) == 0
    assert "forward" not in vars(module)


def test_another_type_goes_through_the_modules_own_code() -> None:
    module, original = PlainRMSNorm(), PlainRMSNorm()
    assert norms.fuse(module) == 1
    x = torch.randn(3, WIDTH).bfloat16()
    assert torch.equal(module(x), original(x))


FORMS = {"Llama": 0.0, "Qwen 3": 0.0, "Gemma 2": 1.0, "Mistral, sliding window": 0.0}


@pytest.mark.parametrize("name", sorted(FORMS))
def test_the_norms_of_models_are_found(tmp_path: Path, name: str) -> None:
    (architecture,) = [case for case in CATALOG if case.name == name]
    compute = ComputeSettings(device="cpu", packing="padded")
    model = Policy.open(architecture.build(tmp_path), compute, LoraSettings(), 0).model
    rms_norms = [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]
    assert rms_norms
    assert all(isinstance(vars(module)["forward"], norms._Fused) for module in rms_norms)
    assert {vars(module)["forward"]._form.shift for module in rms_norms} == {FORMS[name]}


NORMED = norms._normed
FAULTS: list[Any] = [
    lambda x, weight, form: NORMED(x, weight, NormFormula(0.0, form.shift)),
    lambda x, weight, form: NORMED(x, weight, NormFormula(form.epsilon, 0.0)),
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_not_put_in(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    module = ShiftedRMSNorm()
    assert norms.form_of(module) == NormFormula(1e-6, 1.0)
    monkeypatch.setattr(norms, "_normed", fault)
    assert norms.form_of(module) is None


def test_two_runs_are_equal_bit_for_bit(base: Path) -> None:
    assert any(isinstance(vars(module).get("forward"), norms._Fused) for module in open_policy(base).model.modules())
    x, upstream = torch.randn(1, 7, WIDTH), torch.randn(1, 7, WIDTH)
    module = PlainRMSNorm()
    norms.fuse(module)
    first, two = (results(module, x, upstream) for _ in range(2))
    assert all(torch.equal(first[name], two[name]) for name in first)
