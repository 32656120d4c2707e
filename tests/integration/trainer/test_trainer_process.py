"""Tests of a trainer: after a kill no experience is lost or trained twice (P4), and its versions are served.

The trainer stores its own offsets and pauses when its queue is full. The real torch engine probes its versions, they
are sampled from, and the samples are trained. End-to-end tests cover HTTP and the bus; here the tokens and logprobs are
those of the engine.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import threading
import tomllib
import urllib.request
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_inference.engine import Sampling, Start
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.clock import SystemClock
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import Outgoing, decode
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import VersionCache
from headrace_schemas import Branch, Checkpoint, DeadLetter, Event, Experience, Probe, Span, TrainingMetrics
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.blobs import Manifest
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.settings import TrainerSettings
from tests.integration.conftest import TrainerProcess
from tests.support import tiny_model
from tests.support.presence import draw_seed
from tests.unit.trainer.world import experience

COUNT = 160
BATCH = 8
E = TypeVar("E", bound=Event)


class Observer:
    """Reader of the events that one model's trainer publishes on the bus."""

    def __init__(self, bus: BusSettings, model: str, blobs: BlobStore) -> None:
        self._bus = bus
        self._model = model
        self._blobs = blobs
        self.checkpoints: dict[str, Checkpoint] = {}
        self.accounts: dict[str, TrainingMetrics] = {}
        self.letters: dict[str, DeadLetter] = {}
        self.changed = asyncio.Event()

    async def run(self, event: type[Event]) -> None:
        reader = consumer(self._bus, "test")
        await reader.start()
        try:
            await reader.seek_to_beginning(*await assign_all(reader, event.topic))
            async for message in reader:
                self._note((await decode(record_of(message), self._blobs)).event)
        finally:
            await reader.stop()

    def _note(self, event: Event) -> None:
        if isinstance(event, Checkpoint) and event.model == self._model:
            self._once(self.checkpoints, event)
        elif isinstance(event, TrainingMetrics) and event.model == self._model:
            self._once(self.accounts, event)
        elif isinstance(event, DeadLetter) and event.service == "trainer" and self._model.encode() in event.value:
            self._once(self.letters, event)
        self.changed.set()

    @staticmethod
    def _once(seen: dict[str, E], event: E) -> None:
        first = seen.setdefault(event.event_id, event)
        same = first.model_copy(update={"time": event.time}) == event
        assert same, f"{event.event_id} was said twice and differently"

    @property
    def fates(self) -> list[tuple[str, int]]:
        return [(v.experience_id, v.revision) for account in self.accounts.values() for v in account.verdicts]

    async def wait_for_versions(self, count: int, process: TrainerProcess) -> None:
        await self.wait(lambda: len(self.checkpoints) >= count, f"{count} versions", process)

    async def wait(self, condition: Callable[[], bool], label: str, process: TrainerProcess) -> None:
        try:
            async with asyncio.timeout(60):
                while not condition():
                    assert process.running(), process.log[-3000:]
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            pytest.fail(f"{label}: not after 60 s; {process.log[-3000:]}")


@pytest.mark.long
async def test_a_killed_trainer_goes_on_where_it_was(
    bus: str, base: Path, tmp_path: Path, processes: list[TrainerProcess]
) -> None:
    seed = draw_seed()
    draw = random.Random(seed)
    model = f"m-{uuid.uuid4().hex[:8]}"
    process = TrainerProcess(
        tmp_path, bus, base, MODEL=model, BATCH_EXPERIENCES=BATCH, BATCH_WAIT_S=0.5, BATCH_EXPERIENCES_MIN=1,
        MAX_STALENESS=10_000, SAVE_INTERVAL_S=0.5,
    )  # fmt: skip
    processes.append(process)
    settings = BusSettings(address=bus)
    await topics.ensure(settings)
    blobs = BlobStore((process.data_dir / "blobs").as_uri())
    observer = Observer(settings, model, blobs)
    watching = [asyncio.create_task(observer.run(event)) for event in (Checkpoint, TrainingMetrics, DeadLetter)]
    producer = EventProducer(settings, "test", blobs)
    await producer.start()
    try:
        process.begin()
        await observer.wait(lambda: len(observer.checkpoints) == 1, "the base version", process)
        (first,) = observer.checkpoints.values()
        expected = await feed(producer, model, first.version, draw)
        await observer.wait_for_versions(len(observer.checkpoints) + draw.randint(2, 12), process)
        process.kill()
        process.begin()
        await observer.wait(lambda: len(observer.fates) >= len(expected), "every verdict", process)
        await asyncio.to_thread(healthy, process)
        assert await asyncio.to_thread(process.stop) == 0
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await producer.stop()

    assert sorted(observer.fates) == sorted(expected), "one verdict each, and none missing"
    assert len(observer.letters) == 3, "one dead letter for each piece of poison"
    steps = sorted(checkpoint.step for checkpoint in observer.checkpoints.values())
    assert steps == list(range(len(steps)))
    check_state(blobs)


async def feed(producer: EventProducer, model: str, version: str, draw: random.Random) -> list[tuple[str, int]]:
    """Send experiences, redeliveries, revisions, withdrawals without tokens, and invalid records.

    Return the ids and revisions that need an outcome.
    """
    expected: list[tuple[str, int]] = []
    for number in range(COUNT):
        events: list[Experience] = [experience(number, version, draw.random(), model=model, task=f"t{number % 5}")]
        if draw.random() < 0.2:
            events.append(events[0])
        if draw.random() < 0.1:
            events.append(experience(number, version, draw.random(), revision=1, model=model, task=f"t{number % 5}"))
        if draw.random() < 0.1:
            events.append(experience(number, version, None, revision=2, model=model, branch=False))
        expected += {(event.experience_id, event.revision) for event in events}
        await producer.send_raw([await producer.encode(event) for event in events])
        if number % 60 == 20:
            await producer.send_raw([Outgoing("experiences", b"poison", f'{{"{model}": {number}}}'.encode(), ())])
    return expected


def healthy(process: TrainerProcess) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{process.port}/health", timeout=10) as answer:
        assert b'"status":"ok"' in answer.read()
    with urllib.request.urlopen(f"http://127.0.0.1:{process.port}/metrics", timeout=10) as answer:
        assert b"headrace_trainer_steps" in answer.read()


def check_state(blobs: BlobStore) -> None:
    """Check that each trained revision has contributed once to the remaining weights."""
    saved = LineageStore(blobs, "main").read()
    assert saved is not None
    for name, entry in saved.window.items():
        assert len(entry.contributions) <= len(entry.revisions), name
        assert len({contribution.step for contribution in entry.contributions}) == len(entry.contributions), name
    trained = sum(len(entry.contributions) for entry in saved.window.values())
    assert COUNT * 0.75 < trained <= saved.steps * (BATCH + 3)


SERVED_BATCH = 16


@pytest.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    engine = TorchEngine(TorchSettings(device="cpu", threads=1))
    yield engine
    await engine.stop()


async def play(engine: TorchEngine, version: str, number: int, draw: random.Random) -> Experience:
    """Return the experience of one call: a random prompt, a sampled answer, and a reward for low token ids."""
    temperature = draw.choice([0.7, 1.0, 1.3])
    prompt = [draw.randrange(300) for _ in range(draw.randint(3, 20))]
    sampling = Sampling(max_tokens=draw.randint(2, 12), temperature=temperature, seed=number)
    token_ids: list[int] = []
    logprobs: list[float] = []
    async for tokens in engine.generate(prompt, sampling, version, [Start()], stream=False):
        token_ids += tokens.token_ids
        logprobs += tokens.logprobs
    span = Span(
        start=len(prompt), logprobs=tuple(logprobs), turn_id=f"turn-{number}", version=version, temperature=temperature
    )
    branch = Branch(token_ids=(*prompt, *token_ids), spans=(span,))
    reward = sum(token < 160 for token in token_ids) / len(token_ids)
    return experience(number, version, reward=reward).model_copy(update={"branch": branch})


async def serve(engine: TorchEngine, lineage: Lineage, cache: VersionCache) -> str:
    """Load and probe the newest version, as a replica does."""
    manifest, folder = await cache.fetch(lineage.saved.checkpoint.manifest)
    await engine.load(folder, manifest)
    probe = await engine.probe(manifest.version)
    assert probe.passed, probe
    assert probe.max_abs_delta < 1e-4
    if manifest.parent:
        assert probe.parent_max_abs_delta is not None
        assert probe.parent_max_abs_delta > 1e-4, "the new weights really arrived (pitfall 15)"
    return manifest.version


@pytest.mark.parametrize("lora", [{}, {"rank": 4}], ids=["full", "lora"])
async def test_versions_are_served_sampled_and_trained_on(
    engine: TorchEngine, base: Path, tmp_path: Path, lora: dict[str, Any]
) -> None:
    settings = TrainerSettings.model_validate(
        {
            "base": str(base),
            "model": "m",
            "batch_experiences": SERVED_BATCH,
            "steps_per_version": 1,
            "lora": lora,
            "optimizer": {"learning_rate": 2e-2 if lora else 5e-3},
        }
    )
    blobs = BlobStore((tmp_path / "blobs").as_uri())
    lineage = open_lineage(settings, blobs, SystemClock())
    cache, draw = VersionCache(blobs, tmp_path / "cache"), random.Random(1)
    for turn in range(3):
        version = await serve(engine, lineage, cache)
        calls = [play(engine, version, SERVED_BATCH * turn + n, draw) for n in range(SERVED_BATCH)]
        for number, event in enumerate(await asyncio.gather(*calls)):
            lineage.state.admit(event, (0, number), utcnow())
        measured = lineage.step(lineage.next_batch(), threading.Event())
        assert measured["mismatch_tokens"] == measured["loss_tokens"], "all sampled by the weights in training"
        assert measured["mismatch_mean"] < 1e-4
        assert measured["mismatch_p99"] < 1e-3
        assert measured["weight_mean"] == pytest.approx(1.0, abs=1e-3)
        assert measured["clip_fraction"] == measured["truncated_fraction"] == 0.0
        assert lineage.save(publish=True)


ROOT = Path(__file__).parents[3]
GUIDE = tomllib.loads(
    re.search(r"```toml\n(.*?)```", (ROOT / "docs" / "guides" / "lora.md").read_text(encoding="utf-8"), re.DOTALL)[1]  # type: ignore[index]
)["trainer"]
"""The block of the LoRA guide: rank 16, bfloat16, gradient checkpointing."""


def guided_lineage(tmp_path: Path, layers: int) -> tuple[Lineage, VersionCache]:
    """Open a lineage with the settings block of the guide, on a base with `layers` layers."""
    base = tiny_model.build(tmp_path / "base", layers=layers, hidden=64, seed=layers)
    changes = {"base": str(base), "model": "m", "batch_experiences": SERVED_BATCH, "steps_per_version": 1}
    settings = TrainerSettings.model_validate({**GUIDE, **changes, "optimizer": {"learning_rate": 2e-2}})
    blobs = BlobStore((tmp_path / "blobs").as_uri())
    return open_lineage(settings, blobs, SystemClock()), VersionCache(blobs, tmp_path / "cache")


async def load(engine: TorchEngine, lineage: Lineage, cache: VersionCache) -> tuple[Manifest, Path, Probe]:
    manifest, folder = await cache.fetch(lineage.saved.checkpoint.manifest)
    await engine.load(folder, manifest)
    return manifest, folder, await engine.probe(manifest.version)


def plant(folder: Path, target: Path, *, scale: float) -> Path:
    """Copy a version to `target` with noise of the standard deviation `scale` in its weights, and return `target`."""
    shutil.copytree(folder, target)
    (path,) = target.glob("*.safetensors")
    path.unlink()  # the copy may be a link to the blob
    original = load_file(folder / path.name)
    generator = torch.Generator().manual_seed(1)
    planted = {
        name: weights + scale * torch.randn(weights.shape, generator=generator).to(weights.dtype)
        for name, weights in original.items()
    }
    save_file(planted, path, metadata={"format": "pt"})
    return target


@pytest.mark.parametrize("layers", [2, pytest.param(12, marks=pytest.mark.long)])
async def test_the_block_of_the_lora_guide_is_served_and_trained_on_a_cpu(
    engine: TorchEngine, tmp_path: Path, layers: int
) -> None:
    lineage, cache = guided_lineage(tmp_path, layers)
    draw = random.Random(1)
    for turn in range(2):
        manifest, _, probe = await load(engine, lineage, cache)
        assert probe.passed, probe
        assert manifest.fingerprint.dtype == "bfloat16"
        calls = [play(engine, manifest.version, SERVED_BATCH * turn + n, draw) for n in range(SERVED_BATCH)]
        for number, event in enumerate(await asyncio.gather(*calls)):
            lineage.state.admit(event, (0, number), utcnow())
        measured = lineage.step(lineage.next_batch(), threading.Event())
        assert measured["mismatch_mean"] < 0.05, "the engine computes in the type of the trainer"
        assert lineage.save(publish=True)
    assert (await load(engine, lineage, cache))[2].passed


async def test_planted_weights_are_refused_in_bfloat16(engine: TorchEngine, tmp_path: Path) -> None:
    lineage, cache = guided_lineage(tmp_path, 12)
    base, base_folder, _ = await load(engine, lineage, cache)
    draw = random.Random(1)
    for number, event in enumerate(
        await asyncio.gather(*(play(engine, base.version, n, draw) for n in range(SERVED_BATCH)))
    ):
        lineage.state.admit(event, (0, number), utcnow())
    lineage.step(lineage.next_batch(), threading.Event())
    assert lineage.save(publish=True)
    adapter, folder, probe = await load(engine, lineage, cache)
    assert probe.passed
    await engine.unload(adapter.version)
    await engine.load(plant(folder, tmp_path / "other adapter", scale=0.3), adapter)
    assert not (await engine.probe(adapter.version)).passed, "a wrong adapter"
    await engine.unload(adapter.version)
    await engine.unload(base.version)
    await engine.load(plant(base_folder, tmp_path / "other base", scale=0.1), base)
    assert not (await engine.probe(base.version)).passed, "a stale base"
