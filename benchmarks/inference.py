"""Tokens per second of the inference service with the demo's model size: `python -m benchmarks.inference`.

The benchmark compares sixteen concurrent requests with one, in the same run: at the engine and through HTTP, where the
ratio must be six, and as streams, where each token is an event and the second core decides. Transformers' continuous
batching, and the engine without recorded forward passes, are measured for comparison. The cases alternate over several
rounds, so that a busy machine disturbs all equally. The best round counts, which is the least disturbed, and the median
is reported as well. The benchmark takes about a minute and writes `reports/bench-inference.json`, which
docs/decisions/0008 quotes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import torch
import transformers

from headrace_cli.terminal import ProgressDisplay
from headrace_inference.engine import Sampling, Start
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Routing, ServedVersion
from headrace_schemas.values.base import utcnow
from tests.support import tiny_model
from tests.support.servers import BrokerProcess
from tests.support.service_process import ReplicaProcess

PROMPT_TOKENS = 64
NEW_TOKENS = 128
CONCURRENT = 16
RATIO_MIN = 6.0
Run = Callable[[int], Awaitable[int]]
"""Function that sends concurrent requests and returns the number of sampled tokens."""


@dataclass
class Case:
    """One way to sample, with its tokens per second by number of concurrent requests."""

    name: str
    run: Run
    rates: dict[int, list[float]] = field(default_factory=lambda: {1: [], CONCURRENT: []})

    async def measure(self, requests: int) -> None:
        begin = time.perf_counter()
        tokens = await self.run(requests)
        self.rates[requests].append(tokens / (time.perf_counter() - begin))

    @property
    def result(self) -> dict[str, float]:
        result: dict[str, float] = {}
        for requests, rates in self.rates.items():
            result[f"tokens_per_s_{requests}"] = round(max(rates))
            result[f"median_{requests}"] = round(statistics.median(rates))
        result["ratio"] = round(max(self.rates[CONCURRENT]) / max(self.rates[1]), 2)
        return result


def build_model(root: Path) -> tuple[BlobStore, ServedVersion, Path]:
    """Build a random model of the demo's shape (0.4M parameters)."""
    folder = tiny_model.build(
        root / "model", hidden=96, layers=3, vocabulary=600, heads=4, kv_heads=2, feed_forward=256
    )
    blobs = BlobStore((root / "data" / "blobs").absolute().as_uri())
    return blobs, tiny_model.publish(blobs, folder, name="bench"), folder


def prompt_of(salt: int) -> list[int]:
    return [10 + (31 * index + 97 * salt) % 250 for index in range(PROMPT_TOKENS)]


@contextlib.asynccontextmanager
async def engine_case(
    name: str, blobs: BlobStore, served: ServedVersion, folder: Path, **settings: object
) -> AsyncIterator[Case]:
    engine = TorchEngine(TorchSettings.model_validate({"device": "cpu", **settings}))
    manifest = versions.read_manifest(blobs, served.manifest)
    await engine.load(folder, manifest)
    salts = iter(range(10**9))

    async def sample_once() -> int:
        generation = engine.generate(
            prompt_of(next(salts)), Sampling(max_tokens=NEW_TOKENS), served.version, [Start()], stream=False
        )
        return sum([len(tokens.token_ids) async for tokens in generation])

    async def run(requests: int) -> int:
        return sum(await asyncio.gather(*(sample_once() for _ in range(requests))))

    try:
        yield Case(name, run)
    finally:
        await engine.stop()


@contextlib.contextmanager
def transformers_case(folder: Path) -> Any:
    """Yield the case of transformers' `continuous_batching_context_manager`, with logprobs as Headrace needs them."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    sampling = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    batching = ContinuousBatchingConfig(
        block_size=32, num_blocks=512, max_batch_tokens=512, max_memory_percent=0.5, return_logprobs=True
    )
    salts = iter(range(10**9))
    with model.continuous_batching_context_manager(
        generation_config=sampling, continuous_batching_config=batching
    ) as manager:

        def sample(requests: int) -> int:
            manager.add_requests([prompt_of(next(salts)) for _ in range(requests)], max_new_tokens=NEW_TOKENS)
            finished = tokens = 0
            while finished < requests:
                output = manager.get_result(timeout=1)
                if output is not None and output.is_finished():
                    finished += 1
                    tokens += len(output.generated_tokens)
            return tokens

        yield Case("transformers continuous batching", lambda requests: asyncio.to_thread(sample, requests))


@contextlib.asynccontextmanager
async def replica(root: Path, blobs: BlobStore, served: ServedVersion) -> AsyncIterator[str]:
    """Run a real replica on the embedded broker that serves the version, and yield its URL."""
    broker = BrokerProcess(root / "broker")
    process = ReplicaProcess(root / "data", broker.address)
    try:
        broker.start()
        process.start()
        producer = EventProducer(BusSettings(address=broker.address), "bench", blobs)
        await producer.start()
        await producer.send(Routing(time=utcnow(), model="bench", revision=0, aliases={}, serve=(served,)))
        await producer.stop()
        async with aiohttp.ClientSession() as http, asyncio.timeout(60):
            while True:
                async with http.get(f"{process.url}/v1/models") as response:
                    if (await response.json())["data"]:
                        break
                await asyncio.sleep(0.05)
        yield process.url
    finally:
        process.stop()
        broker.stop()


def http_case(http: aiohttp.ClientSession, url: str, version: str, *, stream: bool) -> Case:
    """Return a case with the gateway's requests: token ids and logprobs with every token."""
    salts = iter(range(10**9))

    async def send_once() -> int:
        content = f"{next(salts)} who sent the mail about the meeting on Monday at 10:30?"
        body = {
            "model": version, "messages": [{"role": "user", "content": content}], "max_tokens": NEW_TOKENS,
            "ignore_eos": True, "stream": stream, "return_token_ids": True, "logprobs": True,
        }  # fmt: skip
        async with http.post(f"{url}/v1/chat/completions", json=body) as response:
            text = await response.text()
            assert response.status == 200, text
        if not stream:
            return len(json.loads(text)["choices"][0]["token_ids"])
        events = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n")[:-2]]
        return sum(len(choice.get("token_ids", ())) for event in events for choice in event["choices"])

    async def run(requests: int) -> int:
        return sum(await asyncio.gather(*(send_once() for _ in range(requests))))

    return Case("HTTP, streams" if stream else "HTTP", run)


async def measure(rounds: int) -> dict[str, Any]:
    with (
        ProgressDisplay("bench-inference", 2 * rounds, unit="rounds") as progress,
        tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch,
    ):
        root = Path(scratch)
        blobs, served, folder = build_model(root)
        async with contextlib.AsyncExitStack() as stack:
            cases = [
                await stack.enter_async_context(engine_case("engine", blobs, served, folder)),
                await stack.enter_async_context(
                    engine_case("engine, not recorded", blobs, served, folder, trace=False)
                ),
            ]
            url = await stack.enter_async_context(replica(root, blobs, served))
            http = await stack.enter_async_context(aiohttp.ClientSession())
            cases += [http_case(http, url, served.version, stream=stream) for stream in (False, True)]
            await _rounds(cases, rounds, progress)
        with transformers_case(folder) as library:  # measured alone, because its idle thread spins
            await _rounds([library], rounds, progress)
        return {case.name: case.result for case in [*cases, library]}


async def _rounds(cases: list[Case], rounds: int, progress: ProgressDisplay) -> None:
    for case in cases:
        await case.run(CONCURRENT)  # warm up
    for _ in range(rounds):
        for case in cases:
            for requests in (1, 1, CONCURRENT):
                await case.measure(requests)
        progress.advance()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of measurements")
    parser.add_argument("--report", type=Path, default=Path("reports/bench-inference.json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    cases = asyncio.run(measure(arguments.rounds))
    report = {
        "machine": {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()},
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "cases": cases,
    }
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps(report, indent=2) + "\n")
    for name, result in cases.items():
        print(f"{name:34}", *(f"{key} {value}" for key, value in result.items()))
    short = [name for name in ("engine", "HTTP") if cases[name]["ratio"] < RATIO_MIN]
    if short:
        print(f"ratio below {RATIO_MIN}: {', '.join(short)}")
    return 1 if short else 0


if __name__ == "__main__":
    sys.exit(main())
