"""Takeovers of a hundred versions in sequence while 20 sessions stream: `make demo NAME=swaps`.

The demo runs a private stack with real weights, a gate that passes everything, and two gateways. Each version outputs a
single letter, alternately `y` or `n`, so that an answer by two versions is visible in its text, whatever version its
chunks name. Clients stream one answer after the other, two per session. A new version is published as soon as both
gateways route to the previous one. The program writes `reports/demo-swaps.json`, with exit status 1 if a line does not
hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import numpy as np

from benchmarks import _run_processes
from benchmarks._run_processes import Line, live_stack, print_now, report
from headrace.registry import ModelRegistry
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Checkpoint
from headrace_schemas.values.base import utcnow
from tests.support import tiny_model
from tests.support.service_process import GatewayProcess, wait_healthy

MODEL = "clerk"
SWAPS = 100
SESSIONS = 20
TOKENS = 48
ANSWERS_A_SESSION = 2
GAP_S_MAX = 0.25
TOLD_S_MAX = 1.0
_STEADY_S = 10.0
_SWAP_S_MAX = 120.0
_LOOK_S = 0.02
_CERTAIN = 1.0 - 1e-9
LETTERS = (_run_processes.YES, _run_processes.NO)
SETTINGS: dict[str, object] = {
    "inference.torch.device": "cpu",
    "inference.ttl_s": 20,
    "registry.poll_s": 0.2,
}


@dataclass(frozen=True)
class StoredVersion:
    """A stored version that is not yet published, with the only letter that it outputs."""

    event: Checkpoint
    letter: str


@dataclass
class Answer:
    """One streamed answer as its client received it."""

    began_s: float
    versions: set[str] = field(default_factory=set)
    text: str = ""
    ended: str | None = None
    """Finish reason."""
    is_complete: bool = False
    at_s: list[float] = field(default_factory=list)
    """Monotonic time at which each piece of text arrived, in seconds."""
    error: str | None = None

    @property
    def truncated(self) -> bool:
        return self.error is None and not (self.is_complete and self.ended == "length" and len(self.text) == TOKENS)

    def mixed(self, letters: dict[str, str]) -> bool:
        """Return whether two versions contributed to the answer, by its chunks or its text."""
        return len(self.versions) > 1 or bool(set(self.text) - {letters[version] for version in self.versions})

    @property
    def longest_gap_s(self) -> float:
        """Longest time between two tokens."""
        return max((after - before for before, after in zip(self.at_s, self.at_s[1:], strict=False)), default=0.0)


class StreamingClients:
    """Clients that stream continuously from several gateways."""

    def __init__(self, gateways: Sequence[str]) -> None:
        self._gateways = gateways
        self.answers: list[Answer] = []

    @contextlib.asynccontextmanager
    async def streaming(self) -> AsyncIterator[None]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as http:
            over = asyncio.Event()
            tasks = [asyncio.create_task(self._client(http, number, over)) for number in range(SESSIONS)]
            try:
                yield
            finally:
                over.set()  # each client finishes its answer, so that this program truncates none
                await asyncio.gather(*tasks)

    async def _client(self, http: aiohttp.ClientSession, number: int, over: asyncio.Event) -> None:
        url = self._gateways[number % len(self._gateways)]
        count = 0
        while not over.is_set():
            session = f"client-{number}-{count // ANSWERS_A_SESSION}"
            answer = Answer(time.monotonic())
            try:
                await self._stream(http, url, session, answer)
            except (aiohttp.ClientError, TimeoutError, ValueError, KeyError) as error:
                answer.error = f"{type(error).__name__}: {error}"
                await asyncio.sleep(0.2)
            self.answers.append(answer)
            count += 1

    async def _stream(self, http: aiohttp.ClientSession, url: str, session: str, answer: Answer) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Is the invoice of {session} paid?"}],
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
        }
        async with http.post(f"{url}/v1/chat/completions", json=body, headers={"X-Session-Id": session}) as response:
            if response.status != 200:
                answer.error = f"status {response.status}: {(await response.text())[:200]}"
                return
            async for line in response.content:
                if line.startswith(b"data: "):
                    self._take(line[6:].strip(), answer)

    @staticmethod
    def _take(data: bytes, answer: Answer) -> None:
        if data == b"[DONE]":
            answer.is_complete = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            answer.error = str(chunk["error"])[:200]
            return
        answer.versions.add(chunk["model"])
        for choice in chunk["choices"]:
            answer.ended = choice.get("finish_reason") or answer.ended
            text = choice["delta"].get("content")
            if text:
                answer.text += text
                answer.at_s.append(time.monotonic())


class SwapStack:
    """The stack with its versions, and the times at which each gateway routed to them."""

    def __init__(self, folder: Path, registry: str, gateways: Sequence[str], producer: EventProducer) -> None:
        self._folder, self._gateways, self._producer = folder, gateways, producer
        self.registry = ModelRegistry(registry)
        self.routed_at: dict[str, dict[str, float]] = {}
        """Wall-clock time by version and gateway."""

    def make(self, blobs: BlobStore, count: int) -> list[StoredVersion]:
        """Store a line of versions, each the child of the one before."""
        base = tiny_model.build(self._folder / "base")
        stored: list[StoredVersion] = []
        for step in range(count):
            letter = LETTERS[step % 2]
            right = _CERTAIN if letter == _run_processes.YES else 1.0 - _CERTAIN
            folder = _run_processes.build(base, self._folder / "version", right=right, seed=step)
            parent = stored[-1].event.version if stored else None
            served = tiny_model.publish(blobs, folder, name=MODEL, step=step, parent=parent)
            about = {"model": MODEL, "version": served.version, "lineage": "test", "step": step, "parent": parent}
            event = Checkpoint.model_validate({"time": utcnow(), "manifest": served.manifest, **about})
            stored.append(StoredVersion(event, letter))
        return stored

    async def swap(self, http: aiohttp.ClientSession, version: StoredVersion) -> None:
        """Publish a version and wait until every gateway routes to it."""
        await self._producer.send(version.event)
        times = self.routed_at[version.event.version] = {}
        async with asyncio.timeout(_SWAP_S_MAX):
            await asyncio.gather(
                *(self._wait_until_routed(http, url, version.event.version, times) for url in self._gateways)
            )

    @staticmethod
    async def _wait_until_routed(http: aiohttp.ClientSession, url: str, version: str, times: dict[str, float]) -> None:
        while True:
            async with http.get(f"{url}/v1/models/{MODEL}") as answer:
                if answer.status == 200 and (await answer.json())["version"] == version:
                    times[url] = time.time()
                    return
            await asyncio.sleep(_LOOK_S)

    def takeover_delays_s(self) -> list[float]:
        """Return the seconds from each promotion, as dated by the registry, until the last gateway routed to the
        version."""
        delays = []
        for state in self.registry.versions(MODEL, limit=1000):
            promoted = [event.time.timestamp() for event in state.decisions if event.decision == "promoted"]
            times = self.routed_at.get(state.id)
            if promoted and times:
                delays.append(max(times.values()) - promoted[0])
        return delays


async def play(folder: Path, swaps: int) -> tuple[list[Line], dict[str, object]]:
    """Run the whole demo."""
    async with live_stack(folder, SETTINGS) as stack:
        supervisor = stack.supervisor
        second = GatewayProcess(folder / "gateway-2", supervisor.plan.bus)
        try:
            await asyncio.to_thread(second.start)
            gateways = (supervisor.url("gateway"), second.url)
            stage = SwapStack(folder, supervisor.url("registry"), gateways, stack.producer)
            stored = await asyncio.to_thread(stage.make, stack.blobs, swaps + 1)
            print_now(f"{len(stored)} versions are stored")
            return await _acts(stage, StreamingClients(gateways), stored)
        finally:
            await asyncio.to_thread(second.stop)


async def _acts(
    stage: SwapStack, choir: StreamingClients, stored: Sequence[StoredVersion]
) -> tuple[list[Line], dict[str, object]]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(10)) as http:
        await stage.swap(http, stored[0])
        for url in choir._gateways:
            await asyncio.to_thread(wait_healthy, url)
        async with choir.streaming():
            await asyncio.sleep(2.0)  # warm up
            quiet_s = time.monotonic()
            await asyncio.sleep(_STEADY_S)
            began_s = time.monotonic()
            print_now(f"{SESSIONS} clients stream; the swaps begin")
            for number, version in enumerate(stored[1:], 1):
                await stage.swap(http, version)
                if number % 10 == 0:
                    print_now(f"  {number} swaps, {len(choir.answers)} answers")
            ended_s = time.monotonic()
    steady = [answer for answer in choir.answers if quiet_s <= answer.began_s < began_s]
    answers = [answer for answer in choir.answers if began_s <= answer.began_s < ended_s]
    letters = {version.event.version: version.letter for version in stored}
    return lines_of(steady, answers, letters, await asyncio.to_thread(stage.takeover_delays_s), len(stored) - 1)


def lines_of(
    steady: Sequence[Answer], answers: Sequence[Answer], letters: dict[str, str], delays_s: Sequence[float], swaps: int
) -> tuple[list[Line], dict[str, object]]:
    """Return the lines and the numbers of the report.

    `steady` answers began before the first swap. An extra gap is the time beyond the median of their longest gaps.
    """
    failed = [answer.error for answer in answers if answer.error is not None]
    truncated = sum(answer.truncated for answer in answers)
    mixed = sum(answer.mixed(letters) for answer in answers)
    usual_s = float(np.median([answer.longest_gap_s for answer in steady])) if steady else 0.0
    extra_s = [max(0.0, answer.longest_gap_s - usual_s) for answer in answers] or [float("inf")]
    gap_s, worst_s = float(np.quantile(extra_s, 0.99)), max(extra_s)
    half_s, most_s = (float(np.quantile(extra_s, part)) for part in (0.5, 0.95))
    drawn = len({version for answer in answers for version in answer.versions})
    delays = sorted(delays_s) or [float("inf")]
    late_s = float(np.quantile(delays, 0.99))
    lines = [
        Line(f"{swaps} versions took over, and streamed answers", len(delays_s) > swaps, f"{drawn} answered"),
        Line("no answer failed", not failed, f"{len(failed)} of {len(answers)} {failed[:2] or ''}"),
        Line("no answer was truncated", truncated == 0, f"{truncated} of {len(answers)}"),
        Line("no answer is of two versions", mixed == 0, f"{mixed} of {len(answers)}"),
        Line(
            "the longest extra gap between two tokens of an answer is 250 ms at p99",
            gap_s <= GAP_S_MAX,
            f"{1000 * gap_s:.0f} ms beyond the usual {1000 * usual_s:.0f} ms; median {1000 * half_s:.0f} ms, p95 "
            f"{1000 * most_s:.0f} ms, at most {1000 * worst_s:.0f} ms",
        ),
        Line(
            "a decision is with every gateway within a second at p99",
            late_s <= TOLD_S_MAX,
            f"{1000 * late_s:.0f} ms, median {1000 * float(np.median(delays)):.0f} ms, at most "
            f"{1000 * delays[-1]:.0f} ms",
        ),
    ]
    numbers: dict[str, object] = {
        "swaps": swaps, "answers": len(answers), "steady_answers": len(steady),
        "usual_gap_ms": round(1000 * usual_s, 1),
        "extra_gap_ms_p50": round(1000 * half_s, 1), "extra_gap_ms_p95": round(1000 * most_s, 1),
        "extra_gap_ms_p99": round(1000 * gap_s, 1), "extra_gap_ms_max": round(1000 * worst_s, 1),
        "told_ms_p99": round(1000 * late_s, 1), "told_ms_max": round(1000 * delays[-1], 1),
    }  # fmt: skip
    return lines, numbers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--swaps", type=int, default=SWAPS, help="how many versions take over (%(default)s)")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="headrace-demo-swaps-") as name:
        lines, numbers = asyncio.run(play(Path(name), options.swaps))
    return report("demo-swaps", lines, numbers, time.monotonic() - began)


if __name__ == "__main__":
    sys.exit(main())
