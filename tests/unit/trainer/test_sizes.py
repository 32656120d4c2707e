"""Tests of computed memory sizes of training, compared with real parameters, files and tensors stored by autograd.

Options of CPU libraries are tested, and the check that matrix products are not rounded.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Common
from headrace_trainer import sizes as sizes_module
from headrace_trainer.check import check
from headrace_trainer.settings import ComputeSettings, TrainerSettings
from headrace_trainer.sizes import Shape, Sizes, describe_sizes, pack_tokens, suggest_settings
from headrace_trainer.torch_learner.model import devices
from tests.support import tiny_model

SMOLLM2 = Shape(134_515_008, 4_884_480, 4, 30, 576, 576, 192, 1536, 8192)
GB = 1e9


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    return tiny_model.build(folder, layers=3, hidden=128, heads=4, kv_heads=2, feed_forward=384)


def settings_of(base: Path | str, **changes: object) -> TrainerSettings:
    return TrainerSettings.model_validate({"base": str(base), **changes})


def shape_of(base: Path, settings: TrainerSettings) -> Shape:
    shape = Shape.read(base, settings.lora)
    assert shape is not None
    return shape


@pytest.mark.parametrize("rank", [0, 4])
def test_counts_and_files_are_those_of_the_real_model(base: Path, tmp_path: Path, rank: int) -> None:
    from headrace_trainer.torch_learner.model.policy import Policy
    from headrace_trainer.torch_learner.version_files import save_adapter, save_weights

    settings = settings_of(base, lora={"rank": rank})
    shape = shape_of(base, settings)
    policy = Policy.open(base, settings.compute, settings.lora, 0)
    assert shape.parameters == policy.size - shape.adapters
    sizes = Sizes.of(shape, settings)
    assert sizes.trained == sum(parameter.numel() for parameter in policy.parameters.values())
    if rank:
        save_adapter(policy, tmp_path, "base")
    else:
        save_weights(policy, tmp_path, policy.tensors())
    written = sum(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
    assert sizes.version_bytes == pytest.approx(written, rel=0.1)


@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 4}, "compute": {"dtype": "bfloat16"}}], ids=str)
def test_activations_are_those_that_autograd_stores(base: Path, changes: dict[str, Any]) -> None:
    from headrace_runtime.storage.versions import fingerprint_tokens
    from headrace_trainer.torch_learner.model import sequence_bound
    from headrace_trainer.torch_learner.model.policy import Policy, _plain_row

    settings = settings_of(base, **changes)
    shape = shape_of(base, settings)
    policy = Policy.open(base, settings.compute, settings.lora, 0)
    row = _plain_row(fingerprint_tokens(policy.vocabulary))
    counted = sequence_bound.token_bytes(policy, row, recomputed=False)
    fewer = settings.model_copy(update={"compute": settings.compute.model_copy(update={"pack_tokens": 1})})
    more = settings.model_copy(update={"compute": settings.compute.model_copy(update={"pack_tokens": 1001})})
    computed = (Sizes.of(shape, more).trainer_bytes - Sizes.of(shape, fewer).trainer_bytes) / 1000
    assert computed == pytest.approx(counted, rel=0.35)


def test_a_model_of_135_million_parameters_has_these_sizes() -> None:
    whole = Sizes.of(SMOLLM2, settings_of("b"))
    assert whole.version_bytes / GB == pytest.approx(0.54, abs=0.01)
    assert whole.restore_point_bytes / GB == pytest.approx(1.08, abs=0.01)
    assert whole.trainer_bytes < 8 * GB
    long_passes = Sizes.of(SMOLLM2, settings_of("b", compute={"pack_tokens": 4096}))
    assert long_passes.trainer_bytes > whole.trainer_bytes + 3 * GB
    lora = settings_of("b", lora={"rank": 16}, compute={"dtype": "bfloat16", "gradient_checkpointing": True})
    adapters = Sizes.of(SMOLLM2, lora)
    assert adapters.trained == SMOLLM2.adapters
    assert adapters.version_bytes < whole.version_bytes / 20
    assert adapters.trainer_bytes < 0.7 * whole.trainer_bytes


def test_passes_of_a_large_model_are_shorter_on_a_cpu_than_those_of_a_small_one(base: Path) -> None:
    from headrace_trainer.torch_learner.model.policy import Policy

    plain, lora = settings_of("b"), settings_of("b", lora={"rank": 16}, compute={"gradient_checkpointing": True})
    assert pack_tokens(SMOLLM2, plain.compute, plain.lora, on_cpu=True) == 1024
    assert pack_tokens(SMOLLM2, lora.compute, lora.lora, on_cpu=True) == 4096, "recomputed layers store less"
    assert pack_tokens(SMOLLM2, plain.compute, plain.lora, on_cpu=False) == 4096
    assert pack_tokens(None, plain.compute, plain.lora, on_cpu=True) == 4096
    huge = dataclasses.replace(SMOLLM2, layers=3000)
    assert pack_tokens(huge, plain.compute, plain.lora, on_cpu=True) == 512
    assert pack_tokens(huge, ComputeSettings(pack_tokens=77), plain.lora, on_cpu=True) == 77
    assert Policy.open(base, ComputeSettings(device="cpu"), plain.lora, 0).pack_tokens == 4096
    assert Policy.open(base, ComputeSettings(device="cpu", pack_tokens=9), plain.lora, 0).pack_tokens == 9


def test_suggestions_take_adapters_where_all_weights_need_too_much_memory(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_of(base)
    assert suggest_settings(base, settings) == {
        "trainer.optimizer.learning_rate": 1e-4,
        "trainer.compute.pack_tokens": 4096,
    }
    monkeypatch.setattr(sizes_module, "_TRAINER_BYTES_MAX", 1)
    assert suggest_settings(base, settings) == {
        "trainer.optimizer.learning_rate": 1e-3,
        "trainer.compute.pack_tokens": 4096,
        "trainer.lora.rank": 16,
        "trainer.compute.dtype": "auto",
    }
    suggested = {"lora": {"rank": 16}, "compute": {"dtype": "auto"}, "optimizer": {"learning_rate": 1e-3}}
    assert settings_of(base, **suggested).lora.rank == 16, "the trainer takes what is suggested"


def test_the_sentences_name_the_rate_and_whether_it_was_chosen(base: Path) -> None:
    chosen, given = (
        next(describe_sizes(base, settings_of(base, **changes)))
        for changes in ({}, {"optimizer": {"learning_rate": 3e-5}})
    )
    assert "by the size of the model" in chosen
    assert chosen.startswith(f"{shape_of(base, settings_of(base)).parameters:,} parameters, all trained")
    assert "learning rate 3e-05; without this setting 0.0001" in given
    assert "adapters trained" in next(describe_sizes(base, settings_of(base, lora={"rank": 4})))


def test_a_rate_of_all_weights_that_adapters_inherit_is_pointed_out(base: Path) -> None:
    written = suggest_settings(base, settings_of(base))["trainer.optimizer.learning_rate"]
    rates = {"optimizer": {"learning_rate": written}}
    assert next(describe_sizes(base, settings_of(base, **rates))).endswith(f"learning rate {written}")
    adapted = next(describe_sizes(base, settings_of(base, lora={"rank": 16}, **rates)))
    assert adapted.endswith(
        f"learning rate {written}; without this setting 0.001, as for adapters of a model of this size"
    )


def test_a_large_base_is_multiplied_in_bfloat16_where_the_processor_can(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes_module, "_LARGE", 1)
    suggested = suggest_settings(base, settings_of(base))
    assert (suggested["trainer.compute.dtype"], "trainer.lora.rank" in suggested) == ("auto", False)


async def test_adapters_for_modules_that_the_base_has_not_are_refused_with_its_names(base: Path) -> None:
    partly, none = ({"rank": 4, "targets": targets} for targets in (["q_proj", "query_key_value"], ["c_attn"]))
    assert any(
        "no query_key_value; the other targets" in line for line in describe_sizes(base, settings_of(base, lora=partly))
    )
    with pytest.raises(SettingError, match=r"'c_attn'.* down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"):
        await check(Common(), settings_of(base, lora=none))
    assert await check(Common(), settings_of(base, lora=partly, compute={"device": "cpu"})) == []


def test_a_configuration_with_other_names_has_no_sizes(base: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"n_layer": 2}')
    assert list(describe_sizes(tmp_path, settings_of(tmp_path))) == []


def _growth(work: Callable[[], None]) -> int:
    """Return the growth of this process's memory during `work` in bytes."""
    from headrace_trainer.torch_learner.model import devices

    devices.return_unused_memory()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at the present size
    before = _resident_bytes("VmRSS")
    work()
    return _resident_bytes("VmHWM") - before


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read from /proc")
def test_save_and_restore_hold_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from headrace_trainer.learner import OPTIMIZER, WEIGHTS
    from headrace_trainer.torch_learner import stored_tensors
    from headrace_trainer.torch_learner.learner import TorchLearner

    base = tiny_model.build(tmp_path / "base", layers=6, hidden=256, heads=4, feed_forward=2048)
    folder = tmp_path / "copy"
    folder.mkdir()
    learner = TorchLearner.open(base, settings_of(base))
    for parameter in learner.policy.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    learner.optimizer.step()
    learner.optimizer.zero_grad()
    copy = learner.copy("m@0123456789abcdef")
    written = _growth(lambda: copy.write(folder))
    state = (folder / WEIGHTS).stat().st_size + (folder / OPTIMIZER).stat().st_size
    assert written < 0.2 * state
    assert _growth(copy.detach) > 0.8 * state, "a copy in memory is visible in these figures"
    copy.drop()
    monkeypatch.setattr(stored_tensors, "_MAPPED_BYTES_MAX", 1 << 20)
    assert _growth(lambda: learner.restore(folder, with_random=True)) < 0.6 * state


SETTINGS: Any = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
FAULTS = """
# Before 2.38 glibc cannot use the place of an aligned block again while a thread's cache holds the small pieces beside
# it (bug 14581). The cache holds seven of each size, so the last rounds count.
import resource, torch
from headrace_trainer.torch_learner.model import devices

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    first, second = torch.zeros(8_000_000), torch.zeros(40_000_000)
    del first, second
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

returned = [faults() for _ in range(4)]
assert devices.keep_memory()
kept = [faults() for _ in range(20)]
print(min(returned), max(kept[16:]))
"""

HELD = """
import torch
from headrace_trainer.torch_learner.model import devices, sequence_bound

def held_mb():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) // 1024 for line in status if line.startswith("VmRSS"))

assert devices.keep_memory()
before = held_mb()
several = [torch.ones(5_000_000) for _ in range(20)]
last = torch.ones(1000)
del several
kept = held_mb() - before
sequence_bound.free_bytes(torch.device("cpu"))
print(kept, held_mb() - before)
"""


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before = SETTINGS.fp32_precision
    yield
    SETTINGS.fp32_precision = before


def test_products_are_exact_with_whatever_makes_them() -> None:
    devices.multiply_directly()
    left, right = torch.randn(300, 70), torch.randn(70, 90)
    exact = left.double() @ right.double()
    assert float((left @ right - exact).abs().max()) < 1e-4


@pytest.mark.parametrize("product", ["bmm", "addmm"])
def test_who_rounds_is_not_asked(monkeypatch: pytest.MonkeyPatch, product: str) -> None:
    """A CPU with bfloat16 units rounds one kind of product, which `computes_exactly` must detect."""
    original = getattr(torch, product)

    def rounded(*tensors: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = original(*(tensor.bfloat16().float() for tensor in tensors))
        return result

    SETTINGS.fp32_precision = "none"
    monkeypatch.setattr(torch, product, rounded)
    assert not devices.computes_exactly()
    assert not devices.multiply_directly()
    assert SETTINGS.fp32_precision == "none"


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be asked to keep memory")
def test_freed_memory_stays() -> None:
    process = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=60)
    returned, kept = map(int, process.stdout.split())
    assert kept < 100
    assert returned > 100, "else this test sees nothing"


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can be asked to keep memory")
def test_who_asks_what_is_free_has_it_given_back() -> None:
    process = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, check=True, timeout=300)
    kept_mb, left_mb = (int(each) for each in process.stdout.split()[-2:])
    assert kept_mb > 350
    assert left_mb < 100
