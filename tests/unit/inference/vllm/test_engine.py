"""Tests of vLLM engine cores that start, stop, fail and die.

The contract tests in `tests/contract/engine` hold the stand-in for vLLM to the real one. A stopped engine core ends
without a reported failure.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest

from headrace_inference import metrics
from headrace_inference.engine import ENGINES, Sampling, Start, Tokens
from headrace_inference.errors import EngineFailed, NoRoom, UnknownVersion, VersionUnusable
from headrace_inference.vllm_engine import library, settings
from headrace_inference.vllm_engine.core import LLM, Core, StartedCore
from headrace_inference.vllm_engine.engine import VllmEngine
from headrace_inference.vllm_engine.settings import VllmSettings
from headrace_runtime.errors import SettingError
from tests.contract.engine.stand_in import CoreDied, StandIn, StandInLLM
from tests.unit.inference.conftest import Models, prompt_of

SETTINGS = VllmSettings(cores_max=2, adapters_max=2, sequences_max=4, waiting_max=4, context_tokens_max=256)
WAIT_S = 30


class Rig:
    """A vLLM engine over the stand-in for vLLM."""

    def __init__(self, models: Models) -> None:
        self.models = models
        self.library = StandIn(SETTINGS)
        self.engine = VllmEngine(SETTINGS, self.library)

    async def load(self, *names: str) -> None:
        for name in names:
            stored = getattr(self.models, name)
            await self.engine.load(stored.folder, stored.manifest)

    async def sample(self, version: str, **how: Any) -> Tokens:
        collected = Tokens(0)
        sampling = Sampling(**{"max_tokens": 6, **how})
        async for tokens in self.engine.generate(prompt_of(9), sampling, version, [Start()], stream=True):
            collected.add(tokens)
        return collected

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110 (the library has no event for it)
                await asyncio.sleep(0.005)


@pytest.fixture
async def rig(models: Models) -> AsyncIterator[Rig]:
    created = Rig(models)
    yield created
    await created.engine.stop()


async def test_a_core_stays_as_long_as_an_adapter_needs_it(rig: Rig, models: Models) -> None:
    """Routing may drop a base version before the adapters on it have answered."""
    await rig.load("first", "adapter")
    await rig.engine.unload(models.first.version)
    with pytest.raises(UnknownVersion):
        rig.engine.generate(prompt_of(5), Sampling(), models.first.version, [Start()], stream=True)
    assert len((await rig.sample(models.adapter.version)).token_ids) == 6
    await rig.load("first")
    assert len(rig.library.started) == 1, "the core was still there"
    await rig.engine.unload(models.first.version)
    await rig.engine.unload(models.adapter.version)
    (core,) = rig.library.started
    assert core.shut
    with pytest.raises(VersionUnusable, match=f"its base {models.first.version} is not loaded"):
        await rig.load("adapter")


async def test_adapters_have_a_number_that_was_never_used(rig: Rig, models: Models) -> None:
    """vLLM caches KV by the adapter's number, so a reused number would give a new adapter the KV of an old one."""
    await rig.load("first", "adapter")
    (core,) = rig.library.started
    before = set(core._weights)
    await rig.engine.unload(models.adapter.version)
    assert set(core._weights) == {0}
    await rig.load("adapter")
    assert not (set(core._weights) & before) - {0}
    assert core._pinned == set(core._weights) - {0}, "or vLLM could read it again from a folder that is gone"


async def test_a_core_that_does_not_start_is_a_version_that_fails(rig: Rig, models: Models) -> None:
    await rig.load("first")
    with pytest.raises(VersionUnusable, match=f"{models.second.version}: vLLM cannot start with this version: OSError"):
        await rig.engine.load(models.second.folder / "nowhere", models.second.manifest)
    assert len((await rig.sample(models.first.version)).token_ids) == 6
    await rig.load("second")
    third = models.second.manifest.model_copy(update={"step": 7})
    with pytest.raises(NoRoom, match=r"cores_max allows 2 full versions at a time, and .* and .* are loaded"):
        await rig.engine.load(models.second.folder, third)


async def test_an_adapter_that_vllm_refuses_leaves_nothing_behind(
    rig: Rig, models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    await rig.load("first")
    (core,) = rig.library.started

    async def refuse(_: object) -> bool:
        raise RuntimeError("Call to pin_lora failed: no such layer")

    with monkeypatch.context() as broken:
        broken.setattr(core, "pin_lora", refuse)
        with pytest.raises(VersionUnusable, match="vLLM refuses the adapter: Call to pin_lora failed: no such layer"):
            await rig.load("adapter")
    assert set(core._weights) == {0}
    await rig.load("adapter")


async def test_a_dead_core_fails_its_streams_and_ends_the_process(rig: Rig, models: Models) -> None:
    """`app` polls `check`, whose error ends the process, and the supervisor restarts it."""
    await rig.load("first", "second")
    streams = [
        asyncio.create_task(rig.sample(version.version, max_tokens=200)) for version in (models.first, models.second)
    ]
    await rig.until(lambda: bool(rig.library.started[0].running and rig.library.started[1].running))
    rig.library.started[1].die()
    assert not rig.engine.alive
    with pytest.raises(EngineFailed, match=f"the engine core of {models.second.version} has died"):
        rig.engine.check()
    for stream in streams:
        with pytest.raises(EngineFailed, match=r"has died|while computing"):
            await stream
    assert rig.engine.in_flight() == 0
    with pytest.raises(EngineFailed):
        await rig.load("adapter")


async def test_a_request_that_breaks_is_alone(rig: Rig, models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    await rig.load("first")
    surviving = asyncio.create_task(rig.sample(models.first.version, max_tokens=60))
    await rig.until(lambda: bool(rig.library.started[0].running))
    failures = metrics.ENGINE_FAILURES._value.get()

    def broken(*_: object) -> int:
        raise CoreDied

    with monkeypatch.context() as patch:
        patch.setattr(StandInLLM, "_prefix", broken)
        with pytest.raises(EngineFailed, match="while computing"):
            await rig.sample(models.first.version)
    assert len((await surviving).token_ids) == 60
    assert metrics.ENGINE_FAILURES._value.get() == failures + 1


async def test_whoever_leaves_is_aborted_in_vllm(rig: Rig, models: Models) -> None:
    """vLLM stops computing when a client disconnects, a stop string ends the answer, or the version is unloaded."""
    await rig.load("first", "adapter")
    (core,) = rig.library.started
    left = rig.engine.generate(
        prompt_of(9), Sampling(), models.first.version, [Start(n) for n in range(3)], stream=True
    )
    await anext(aiter(left))
    assert len(core.running) == 3
    left.close()
    await rig.until(lambda: not core.running)
    stopped = rig.engine.generate(
        prompt_of(9), Sampling(), models.first.version, [Start(until=lambda _: True)], stream=True
    )
    assert [tokens.finish async for tokens in stopped] == ["stop"]
    await rig.until(lambda: not core.running)
    abandoned = rig.engine.generate(prompt_of(9), Sampling(), models.adapter.version, [Start()], stream=True)
    await anext(aiter(abandoned))
    await rig.engine.unload(models.adapter.version)
    await rig.until(lambda: not core.running)
    assert rig.engine._tasks == {}


async def test_a_version_dropped_while_its_core_starts_leaves_no_core(rig: Rig) -> None:
    rig.library.hold = threading.Event()
    loading = asyncio.create_task(rig.load("first"))
    await rig.until(lambda: bool(rig.engine._starts))
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    rig.library.hold.set()
    await rig.until(lambda: bool(rig.library.started and rig.library.started[0].shut))
    assert rig.engine._cores == {}


async def test_stopping_does_not_wait_for_a_core_that_starts(rig: Rig) -> None:
    rig.library.hold = threading.Event()
    loading = asyncio.create_task(rig.load("first"))
    await rig.until(lambda: bool(rig.engine._starts))
    await asyncio.wait_for(rig.engine.stop(), WAIT_S)
    assert rig.library.abandoned
    with pytest.raises(VersionUnusable, match="killed while it started"):
        await loading
    assert not rig.engine.alive
    with pytest.raises(EngineFailed, match="was stopped"):
        rig.engine.check()


async def test_a_running_gauge_goes_with_its_version(rig: Rig, models: Models) -> None:
    await rig.load("first")
    left = rig.engine.generate(prompt_of(9), Sampling(), models.first.version, [Start()], stream=True)
    assert metrics.RUNNING.labels(models.first.version)._value.get() == 1
    left.close()
    await rig.until(lambda: metrics.RUNNING.labels(models.first.version)._value.get() == 0)
    await rig.engine.unload(models.first.version)
    samples = [sample for metric in metrics.RUNNING.collect() for sample in metric.samples]
    assert models.first.version not in {sample.labels["version"] for sample in samples}


async def test_a_probe_and_ranked_requests_take_turns(rig: Rig, models: Models) -> None:
    """In the step of a probe, vLLM returns only sampled tokens to other requests (`vllm_engine/probing.py`)."""
    await rig.load("first")
    ranked = asyncio.create_task(rig.sample(models.first.version, max_tokens=40, top_logprobs=3))
    plain = asyncio.create_task(rig.sample(models.first.version, max_tokens=40))
    await rig.until(lambda: len(rig.library.started[0].running) == 2)
    probe = asyncio.create_task(rig.engine.probe(models.first.version))
    later = asyncio.create_task(rig.sample(models.first.version, top_logprobs=3))
    assert all(len(top) == 3 for top in (await ranked).top)
    assert (await probe).passed
    assert all(len(top) == 3 for top in (await later).top)
    assert len((await plain).token_ids) == 40


async def test_a_probe_that_is_given_up_lets_others_pass(rig: Rig, models: Models) -> None:
    await rig.load("first")
    ranked = asyncio.create_task(rig.sample(models.first.version, max_tokens=200, top_logprobs=3))
    await rig.until(lambda: bool(rig.library.started[0].running))
    probe = asyncio.create_task(rig.engine.probe(models.first.version))
    await asyncio.sleep(0.01)
    probe.cancel()
    with pytest.raises(asyncio.CancelledError):
        await probe
    assert len((await rig.sample(models.first.version, top_logprobs=3)).token_ids) == 6
    assert len((await ranked).token_ids) == 200


def test_a_missing_package_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "find_spec", lambda _name: None)
    with pytest.raises(SettingError, match=r"setting inference.engine = 'vllm': .*not installed.*install GROUP=vllm"):
        ENGINES.get("vllm").make(VllmSettings())


@pytest.mark.parametrize(("rank", "slots"), [(1, 1), (4, 8), (8, 8), (33, 64), (512, 512)])
def test_a_rank_is_rounded_up_to_one_that_vllm_takes(models: Models, rank: int, slots: int) -> None:
    settings = VllmSettings(adapter_rank_max=rank)
    assert library.arguments(settings, models.first.folder, cpu=False)["max_lora_rank"] == slots


def test_what_vllm_is_started_with(models: Models) -> None:
    settings = VllmSettings(context_tokens_max=100_000, adapters_max=0)
    engine_arguments = library.arguments(settings, models.first.folder, cpu=True)
    assert engine_arguments["max_model_len"] == 2048, "what the model allows"
    settings = VllmSettings(context_tokens_max=100_000, adapters_max=0, batch_tokens_max=64)
    unsplit = library.arguments(settings, models.first.folder, cpu=True)
    assert (unsplit["enable_chunked_prefill"], unsplit["max_num_batched_tokens"]) == (False, 2048)
    assert library.arguments(settings, models.first.folder, cpu=False)["max_num_batched_tokens"] == 64
    assert (engine_arguments["dtype"], engine_arguments["enforce_eager"]) == ("float32", True)
    assert "enable_lora" not in engine_arguments
    assert "gpu_memory_utilization" not in engine_arguments
    assert engine_arguments["logprobs_mode"] == "processed_logprobs"
    assert engine_arguments["generation_config"] == "vllm"
    on_gpu = library.arguments(settings, models.first.folder, cpu=False)
    assert (on_gpu["dtype"], on_gpu["enforce_eager"], on_gpu["gpu_memory_utilization"]) == ("auto", False, 0.4)
    assert engine_arguments["seed"] != on_gpu["seed"], "a restarted core does not draw again what it drew before"


def test_the_environment_of_a_core() -> None:
    on_cpu = library.environment(VllmSettings(cpu_kv_gib=3), cpu=True)
    assert on_cpu["VLLM_CPU_KVCACHE_SPACE"] == "3"
    assert on_cpu["TORCHDYNAMO_DISABLE"] == "1"
    on_gpu = library.environment(VllmSettings(), cpu=False)
    assert "TORCHDYNAMO_DISABLE" not in on_gpu
    assert on_gpu["VLLM_NO_USAGE_STATS"] == "1"


def test_neither_its_announcement_nor_its_modules_import_the_package(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; import headrace_inference.vllm_engine.settings as announced;"
        "print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)));"
        "import headrace_inference.vllm_engine.engine, headrace_inference.vllm_engine.library;"
        "print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert process.stdout.split("\n")[:2] == ["[]", "[]"], process.stderr
    assert find_spec("headrace_inference.vllm_engine") is not None


class Listening:
    """Stand-in for `vllm.v1.engine.async_llm.AsyncLLM`, whose task reports that the core's process has ended."""

    def __init__(self) -> None:
        self.gone = threading.Event()
        self.said: list[str] = []
        self.output_handler = asyncio.create_task(self._handle())

    async def _handle(self) -> None:
        await asyncio.to_thread(self.gone.wait)
        self.said.append("output_handler failed")

    def shutdown(self, timeout: float | None = None) -> None:
        self.gone.set()


async def test_a_core_that_is_told_to_end_does_not_report_a_failure() -> None:
    llm = Listening()
    await asyncio.sleep(0.01)
    await Core("tiny@1", StartedCore(cast(LLM, llm), 10, 10)).stop()
    await asyncio.wait([llm.output_handler])
    assert llm.gone.is_set()
    assert llm.said == []
