"""Tests of the trainer's versions in the real torch engine: probed, sampled from, and trained on the samples.

End-to-end tests cover HTTP and the bus. Here the tokens and logprobs are those of the engine.
"""

from __future__ import annotations

import asyncio
import random
import re
import shutil
import threading
import tomllib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from headrace_inference.engine import Sampling, Start
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.clock import SystemClock
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import VersionCache
from headrace_schemas import Branch, Experience, Probe, Span
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.blobs import Manifest
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.settings import TrainerSettings
from tests.support import tiny_model
from tests.unit.trainer.world import experience

BATCH = 16


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
            "batch_experiences": BATCH,
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
        calls = [play(engine, version, BATCH * turn + n, draw) for n in range(BATCH)]
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
    changes = {"base": str(base), "model": "m", "batch_experiences": BATCH, "steps_per_version": 1}
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
        calls = [play(engine, manifest.version, BATCH * turn + n, draw) for n in range(BATCH)]
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
    for number, event in enumerate(await asyncio.gather(*(play(engine, base.version, n, draw) for n in range(BATCH)))):
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
