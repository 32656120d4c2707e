"""Sizes and rates of one training run, or of one replica, in a separate process, which prints a line of JSON.

`ShortTraining` opens a lineage, takes steps and saves versions as the trainer does. The replica is the engine `torch`
with the base and these versions, of which the newest serves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks._run_processes import peak_bytes
from headrace_inference.engine import Sampling, Start
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.clock import SystemClock
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import VersionCache
from headrace_schemas import Branch, Experience, Span
from headrace_schemas.values.ids import session_key
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.lineage.saving import sum_bytes
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.sizes import Shape, pack_tokens

MODEL = "bench"
PROMPT, LENGTH = 64, 256
"""Number of tokens of the prompt, and of the whole sequence."""
STEPS = 2
NEW_TOKENS = 32
CONCURRENT = 16
ATTEMPTS = 2
LINEAGE = "main"


def experience(number: int, version: str, vocabulary: int) -> Experience:
    """Return a sequence of random tokens with a reward of 0 or 1."""
    draw = random.Random(number)
    logprobs = tuple(-draw.uniform(4, 7) for _ in range(LENGTH - PROMPT))
    span = Span(start=PROMPT, logprobs=logprobs, turn_id=f"turn-{number}", version=version)
    return Experience(
        time=datetime.now(UTC),
        experience_id=f"e{number}",
        trajectory_id=f"t{number}",
        session_key=session_key("default", f"s{number}"),
        session_id=f"s{number}",
        model=MODEL,
        branch=Branch(token_ids=tuple(draw.randrange(vocabulary) for _ in range(LENGTH)), spans=(span,)),
        turn_ids=(span.turn_id,),
        reward=float(number % 2),
    )


def resident_bytes() -> int:
    """Return the memory that this process has now."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


def train(options: argparse.Namespace) -> dict[str, Any]:
    """Take two steps of two passes each, with a version after each."""
    settings = TrainerSettings.model_validate({"model": MODEL, "until_end": True, **json.loads(options.settings)})
    base = Path(settings.base)
    shape = Shape.read(base, settings.lora)
    assert shape is not None
    tokens = pack_tokens(shape, settings.compute, settings.lora, on_cpu=True)
    passes_tokens = 2 * tokens
    experiences = passes_tokens // LENGTH
    settings = settings.model_copy(update={"batch_experiences": experiences})
    vocabulary = json.loads((base / "config.json").read_text())["vocab_size"]
    blobs = BlobStore(options.blobs.as_uri())
    lineage = open_lineage(settings, blobs, SystemClock())
    stop, step_s = threading.Event(), []
    for step in range(STEPS):
        head = lineage.saved.head
        for number in range(step * experiences, (step + 1) * experiences):
            lineage.state.admit(experience(number, head, vocabulary), (0, number), datetime.now(UTC))
        began = time.perf_counter()
        measured = lineage.step(lineage.next_batch(), stop)
        step_s.append(time.perf_counter() - began)
        assert measured
        lineage.save(publish=True)
    present = lineage.saved.present
    return {
        "parameters": shape.parameters, "trainer_bytes": peak_bytes(), "pack_tokens": tokens,
        "version_bytes": _version_bytes(lineage, blobs), "restore_point_bytes": sum_bytes([present]),
        "trained_per_s": passes_tokens / min(step_s),
    }  # fmt: skip


def _version_bytes(lineage: Lineage, blobs: BlobStore) -> int:
    """Return the size of the weights of the newest version."""
    checkpoint = lineage.saved.checkpoint
    assert checkpoint is not None
    files = versions.read_manifest(blobs, checkpoint.manifest).files
    return sum(file.blob.size for file in files if file.path.endswith(".safetensors"))


def serve(options: argparse.Namespace) -> dict[str, Any]:
    return asyncio.run(_serve(BlobStore(options.blobs.as_uri()), options.blobs.parent / "cache"))


async def _serve(blobs: BlobStore, cache: Path) -> dict[str, Any]:
    """Load the versions of the training, and let the newest one answer concurrent requests."""
    store = LineageStore(blobs, LINEAGE)
    assert store.take_over()
    saved = store.load()
    assert saved is not None
    engine = TorchEngine(TorchSettings(device="cpu"))
    for published in saved.versions:
        manifest, folder = await VersionCache(blobs, cache).fetch(published.manifest)
        await engine.load(folder, manifest)
        probe = await engine.probe(published.version)
        assert probe.passed, probe
    loaded, loading, rates = resident_bytes(), peak_bytes(), []
    for attempt in range(ATTEMPTS):
        began = time.perf_counter()
        counts = await asyncio.gather(*(_generate(engine, saved.head, attempt, number) for number in range(CONCURRENT)))
        rates.append(sum(counts) / (time.perf_counter() - began))
    await engine.stop()
    return {"replica_bytes": loaded, "loading_bytes": loading, "sampled_per_s": max(rates)}


async def _generate(engine: TorchEngine, version: str, attempt: int, number: int) -> int:
    draw = random.Random(f"{attempt} {number}")
    prompt = [draw.randrange(engine.vocabulary(version)) for _ in range(PROMPT)]
    generation = engine.generate(prompt, Sampling(max_tokens=NEW_TOKENS), version, [Start()], stream=False)
    return sum([len(tokens.token_ids) async for tokens in generation])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("train", "serve"))
    parser.add_argument("--blobs", type=Path, required=True, help="folder of the versions")
    parser.add_argument("--settings", default="{}", help="settings of the trainer, as JSON")
    options = parser.parse_args()
    result = train(options) if options.part == "train" else serve(options)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
