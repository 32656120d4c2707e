"""Streams of the `torch` engine on a GPU that continue while versions are swapped, measured in a separate process.

Clients send requests in sequence to the version that is currently served, as a gateway does. A swap has the steps of
the service for a new routing: load the version, probe it, serve it, and unload the old version when no request uses it.
Afterwards the trainer computes the logprobs of the sampled tokens with the version that each turn names, and with
another one. The program prints one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from benchmarks._gpu_step import GPU_SHAPES, RANK
from headrace_inference.engine import Sampling, Start
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas.values.blobs import Manifest
from headrace_trainer.batches.batch import Row
from headrace_trainer.settings import ComputeSettings, LoraSettings
from headrace_trainer.torch_learner.model.policy import Policy

TOLERANCE = 0.25
"""Tolerance of the probe: the trainer's fingerprint is computed in float32, the engine's answer in bfloat16."""
COMPUTE = {"device": "cuda", "dtype": "bfloat16"}


@dataclass(frozen=True)
class StoredVersion:
    """A version whose files are in a folder."""

    manifest: Manifest
    folder: Path


@dataclass
class Turn:
    """A request of a client, with the version that answered and its answer."""

    version: str
    prompt: list[int]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Maker:
    """Builder of versions of one random model: the base, versions with changed weights, and adapters."""

    def __init__(self, root: Path, shape: str) -> None:
        self._root = root
        self._blobs = BlobStore((root / "blobs").as_uri())
        self._numbers = itertools.count()
        self.folder = GPU_SHAPES[shape].build(root / "base")
        policy = Policy.open(self.folder, ComputeSettings(**COMPUTE, weights="bfloat16"), LoraSettings(), 0)
        self.base = self._stored(self.folder, policy)
        self.full = [self._moved(policy, number) for number in range(3)]
        del policy
        adapted = Policy.open(self.folder, ComputeSettings(**COMPUTE), LoraSettings(rank=RANK), 0)
        self.lora = [self._adapter(adapted, number) for number in range(3)]
        del adapted
        torch.cuda.empty_cache()

    def _stored(self, folder: Path, policy: Policy, base: StoredVersion | None = None) -> StoredVersion:
        manifest, _ = versions.store(
            self._blobs, folder, name="bench", lineage="bench", step=next(self._numbers),
            fingerprint=policy.fingerprint(), parent=self.base.manifest.version if hasattr(self, "base") else None,
            base=base.manifest.version if base else None, tokenizer=base.folder if base else None,
        )  # fmt: skip
        return StoredVersion(manifest, folder)

    def _moved(self, policy: Policy, number: int) -> StoredVersion:
        """Return a version as after training: each weight is changed by a fifth of its tensor's standard deviation."""
        folder = self._root / f"full-{number}"
        shutil.copytree(self.folder, folder)
        draw = torch.Generator("cuda").manual_seed(number)
        moved = {}
        for name, weight in load_file(self.folder / "model.safetensors", device="cuda").items():
            noise = torch.randn(weight.shape, generator=draw, device="cuda")
            spread = weight.float().std() if weight.ndim > 1 else 0.0
            moved[name] = (weight.float() + 0.2 * spread * noise).to(weight.dtype)
        save_file(moved, folder / "model.safetensors", metadata={"format": "pt"})
        policy.load_files(folder)
        return self._stored(folder, policy)

    def _adapter(self, policy: Policy, number: int) -> StoredVersion:
        draw = torch.Generator("cuda").manual_seed(number)
        for parameter in policy.parameters.values():
            parameter.data.copy_(0.02 * torch.randn(parameter.shape, generator=draw, device="cuda"))
        folder = self._root / f"lora-{number}"
        policy.model.save_pretrained(folder)
        return self._stored(folder, policy, self.base)


@dataclass
class Clients:
    """Clients that keep a number of streams open."""

    engine: TorchEngine
    prompt_tokens: int
    new_tokens: int
    vocabulary: int
    serving: str
    turns: list[Turn] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    sampled: int = 0
    waited_s: list[float] = field(default_factory=list)
    """Seconds between two tokens of a stream."""
    stopping: bool = False

    async def run(self, number: int) -> None:
        draw = np.random.default_rng(number)
        while not self.stopping:
            turn = Turn(self.serving, draw.integers(3, self.vocabulary, self.prompt_tokens).tolist())
            try:
                await self._stream(turn)
            except Exception as error:  # noqa: BLE001 (each is a failed request, and counted)
                self.failed.append(f"{type(error).__name__}: {error}")
            else:
                self.turns.append(turn)

    async def _stream(self, turn: Turn) -> None:
        sampling = Sampling(max_tokens=self.new_tokens)
        last = time.perf_counter()
        async for piece in self.engine.generate(turn.prompt, sampling, turn.version, [Start()], stream=True):
            turn.token_ids += piece.token_ids
            turn.logprobs += piece.logprobs
            self.sampled += len(piece.token_ids)
            now = time.perf_counter()
            self.waited_s.append(now - last)
            last = now
        assert len(turn.token_ids) == len(turn.logprobs) == self.new_tokens, "a stream was cut"


async def phase(clients: Clients, seconds: float, swaps: Iterable[StoredVersion], keep: str) -> dict[str, Any]:
    """Measure tokens per second and the longest pause of a stream while versions are swapped."""
    engine, began, before = clients.engine, time.perf_counter(), clients.sampled
    clients.waited_s.clear()
    count, probes = 0, []
    for version in swaps:
        await engine.load(version.folder, version.manifest)
        probe = await engine.probe(version.manifest.version)
        assert probe.passed, probe
        probes.append(probe.max_abs_delta)
        old, clients.serving = clients.serving, version.manifest.version
        await engine.drained(old)
        if old != keep:
            await engine.unload(old)
        count += 1
    await asyncio.sleep(max(0.0, seconds - (time.perf_counter() - began)))
    took = time.perf_counter() - began
    waited = np.array(clients.waited_s or [0.0])
    return {
        "swaps": count, "seconds": round(took, 1), "tokens_per_s": round((clients.sampled - before) / took),
        "pause_ms_median": round(float(np.median(waited)) * 1e3, 1),
        "pause_ms_p99": round(float(np.quantile(waited, 0.99)) * 1e3, 1),
        "pause_ms_max": round(float(waited.max()) * 1e3), "probe_delta_max": max(probes, default=None),
    }  # fmt: skip


def compare_logprobs(maker: Maker, turns: list[Turn], each: int) -> dict[str, Any]:
    """Compare the trainer's logprobs with those of the turns, in nats: with the named version, and with another."""
    report: dict[str, Any] = {}
    full = Policy.open(maker.folder, ComputeSettings(**COMPUTE, weights="bfloat16"), LoraSettings(), 0)
    report["full"] = _logprob_differences(full, [maker.base, *maker.full], turns, each)
    del full
    lora = Policy.open(maker.folder, ComputeSettings(**COMPUTE), LoraSettings(rank=RANK), 0)
    report["lora"] = _logprob_differences(lora, maker.lora, turns, each)
    return report


@torch.no_grad()
def _logprob_differences(
    policy: Policy, versions_to_compare: list[StoredVersion], turns: list[Turn], each: int
) -> dict[str, Any]:
    right: list[torch.Tensor] = []
    wrong: list[torch.Tensor] = []
    count = 0
    for number, version in enumerate(versions_to_compare):
        policy.load_files(version.folder)
        for index in (number, (number + 1) % len(versions_to_compare)):
            mine = [turn for turn in turns if turn.version == versions_to_compare[index].manifest.version][:each]
            if not mine:
                continue
            pack = policy.collate([_row(turn) for turn in mine])
            stated_N = torch.tensor([value for turn in mine for value in turn.logprobs], device=policy.device)
            difference_N = (policy.logprobs(pack)[0] - stated_N).abs()
            (right if index == number else wrong).append(difference_N)
            count += len(mine) * (index == number)
    same_N, other_N = torch.cat(right), torch.cat(wrong)
    return {
        "turns": count, "tokens": len(same_N), "mean": float(same_N.mean()),
        "p99": float(same_N.quantile(0.99)), "max": float(same_N.max()), "another_version_mean": float(other_N.mean()),
    }  # fmt: skip


def _row(turn: Turn) -> Row:
    ids = np.array([*turn.prompt, *turn.token_ids], np.int32)
    mask, zeros = np.arange(len(ids)) >= len(turn.prompt), np.zeros(len(ids), np.float32)
    return Row("", 0, ids, mask, zeros, zeros + 1, np.float32(0), mask)


async def measure(maker: Maker, options: argparse.Namespace) -> dict[str, Any]:
    settings = TorchSettings(
        device="cuda", sequences_max=options.streams, kv_mib_max=options.kv_mib, prefix_mib_max=0,
        prefill_tokens_max=options.prefill, probe_tolerance=TOLERANCE, trace=not options.untraced,
    )  # fmt: skip
    engine = TorchEngine(settings)
    base = maker.base
    began = time.perf_counter()
    await engine.load(base.folder, base.manifest)
    loaded_s = time.perf_counter() - began
    probe = await engine.probe(base.manifest.version)
    assert probe.passed, probe
    shape = GPU_SHAPES[options.shape]
    clients = Clients(engine, options.prompt, options.new, shape.vocabulary, base.manifest.version)
    tasks = [asyncio.create_task(clients.run(number)) for number in range(options.streams)]
    keep = base.manifest.version
    report: dict[str, Any] = {}
    await phase(clients, 3, [], keep)  # warm up
    report["steady"] = await phase(clients, options.seconds, [], keep)
    report["lora_swaps"] = await phase(clients, options.seconds, maker.lora, keep)
    report["lora_steady"] = await phase(clients, options.seconds, [], keep)
    report["full_swaps"] = await phase(clients, options.seconds, maker.full, keep)
    clients.stopping = True
    await asyncio.gather(*tasks)
    await engine.stop()
    report |= {
        "turns": len(clients.turns), "failed": len(clients.failed), "failures": clients.failed[:3],
        "base_loaded_s": round(loaded_s, 1), "base_probe_delta": probe.max_abs_delta,
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 2),
    }  # fmt: skip
    return report | {"trainer": compare_logprobs(maker, clients.turns, options.compare_logprobs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=GPU_SHAPES, default="0.6b")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--prefill", type=int, default=2048)
    parser.add_argument("--kv-mib", type=int, default=8192)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each phase, at least (%(default)s)")
    parser.add_argument("--compared", type=int, default=16, help="turns of each version (%(default)s)")
    parser.add_argument("--untraced", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-gpu-") as root:
        maker = Maker(Path(root), options.shape)
        print(json.dumps(asyncio.run(measure(maker, options))))


if __name__ == "__main__":
    main()
