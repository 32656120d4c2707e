"""Latency that the gateway adds to a call, one call at a time: `python -m benchmarks.gateway_overhead`.

The same call goes to the same replica without a model: directly, through a bare pass-through proxy, through the gateway
on the embedded broker (which makes each turn durable before its client receives the end), and through LiteLLM's proxy
after `make install GROUP=clients`. The routes alternate call by call, so that a busy machine disturbs all equally. The
gateway's median must be at most 10 ms above the bare proxy's, plain and streamed. With 16 concurrent calls, its p99 and
its idle wake-ups are compared with those of a gateway without the runtime's tuning (`_gateway_tuning`). A call of the
Responses and of the Messages API must take at most 1.25 times the CPU of the equal chat call (`_gateway_dialects`).
`from headrace import Client` in a new interpreter must take at most 0.3 s. Writes
`reports/bench-gateway_overhead.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import _gateway_tuning
from benchmarks._run_processes import Summary
from headrace_cli.terminal import ProgressDisplay
from headrace_schemas import Replica
from tests.support import presence
from tests.support.fake_replica import VERSION, FakeReplica
from tests.support.gateway import routing
from tests.support.processes import free_port
from tests.support.servers import BrokerProcess
from tests.support.service_process import GatewayProcess, bus_view, wait_healthy

ADDED_MS_MAX = 10.0
IMPORT_S_MAX = 0.3
_IMPORTS = 7
_START_S = 300.0
_WARM_UP = 10
_KEY = "sk-bench"
"""API key. LiteLLM's proxy requires one, and the others ignore it."""
MODES = ("plain", "stream")


@dataclass
class Way:
    """One route to the replica, with the latencies of its calls in milliseconds, by plain and streamed mode."""

    name: str
    url: str
    model: str
    ms: dict[str, list[float]] = field(default_factory=lambda: {mode: [] for mode in MODES})

    async def call(self, http: aiohttp.ClientSession, number: int, mode: str) -> None:
        content = f"{self.name} {number}: who sent the mail about the meeting on Monday at 10:30?"
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": content}],
            "stream": mode == "stream",
        }
        began = time.perf_counter()
        headers = {"authorization": f"Bearer {_KEY}"}
        async with http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers) as response:
            text = await response.text()
        self.ms[mode].append((time.perf_counter() - began) * 1e3)
        if response.status != 200 or (mode == "stream" and "[DONE]" not in text):
            raise RuntimeError(f"{self.name}: {response.status} {text[:500]}")

    def result(self, direct: Way) -> dict[str, Any]:
        result = {}
        for mode in MODES:
            summary, direct_summary = Summary.of(self.ms[mode]), Summary.of(direct.ms[mode])
            result[mode] = {
                **summary.latency(),
                "added_p50": round(summary.quantile(0.5) - direct_summary.quantile(0.5), 2),
            }
        return result


async def measure(calls: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        async with contextlib.AsyncExitStack() as stack:
            total = (calls + _WARM_UP) * len(MODES)
            progress = stack.enter_context(ProgressDisplay("bench-gateway_overhead", total, unit="rounds of calls"))
            ways = await _ways(stack, Path(scratch))
            http = await stack.enter_async_context(aiohttp.ClientSession())
            for number in range(calls + _WARM_UP):
                if number == _WARM_UP:
                    for way in ways:
                        way.ms = {mode: [] for mode in MODES}
                for mode in MODES:
                    for way in ways:
                        await way.call(http, number, mode)
                    progress.advance()
    return {way.name: way.result(ways[0]) for way in ways}


async def _ways(stack: contextlib.AsyncExitStack, folder: Path) -> Sequence[Way]:
    """Start all routes and wait until they answer. The direct route is the first."""
    replica_port, bare_port = free_port(), free_port()
    direct = f"http://127.0.0.1:{replica_port}"
    bare = f"http://127.0.0.1:{bare_port}"
    python = sys.executable
    _start(stack, [python, "-m", "tests.support.fake_replica", "replica", str(replica_port), VERSION, "0"], folder)
    _start(stack, [python, "-m", "benchmarks._sessions_replica", str(bare_port), direct], folder)
    gateway = (await stack.enter_async_context(_gateways(folder, direct, {})))[0]
    ways = [Way("direct", direct, VERSION), Way("bare proxy", bare, VERSION), Way("gateway", gateway.url, "tiny")]
    if presence.CLIENTS.exists():
        ways.append(Way("LiteLLM proxy", _litellm(stack, folder, direct), "tiny"))
    for way in ways:
        await _wait_until_answering(way)
    return ways


UNLIMITED = {
    "HEADRACE_GATEWAY__LIMITS_PER_KEY__REQUESTS_PER_S": "100000",
    "HEADRACE_GATEWAY__LIMITS_TOTAL__REQUESTS_PER_S": "100000",
}
"""Environment without the limits of the rate of requests, which a quiet machine exceeds."""


async def measure_tuning(pairs: int, block_s: float) -> dict[str, Any]:
    """Compare the gateway with one without the runtime's tuning, on the same broker and replica."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        untuned = {**UNLIMITED, **_gateway_tuning.untuned_environment(Path(scratch) / "untuned")}
        async with _answering_gateways(Path(scratch), UNLIMITED, untuned) as gateways:
            return await _gateway_tuning.compare(gateways[0], gateways[1], "tiny", pairs, block_s)


async def measure_dialects(blocks: int, calls: int) -> dict[str, Any]:
    """Compare the CPU time of equal calls of the APIs."""
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as scratch:
        async with _answering_gateways(Path(scratch), UNLIMITED) as gateways:
            return await _gateway_tuning.compare_apis(gateways[0], blocks, calls)


@contextlib.asynccontextmanager
async def _answering_gateways(folder: Path, *environs: Mapping[str, str]) -> AsyncIterator[list[GatewayProcess]]:
    """Run a scripted replica and one gateway for each environment, and wait until each answers."""
    async with contextlib.AsyncExitStack() as stack:
        port = free_port()
        command = [sys.executable, "-m", "tests.support.fake_replica", "replica", str(port), VERSION, "0"]
        _start(stack, command, folder)
        gateways = await stack.enter_async_context(_gateways(folder, f"http://127.0.0.1:{port}", *environs))
        for gateway in gateways:
            await _wait_until_answering(Way("gateway", gateway.url, "tiny"))
        yield gateways


@contextlib.asynccontextmanager
async def _gateways(
    folder: Path, replica_url: str, *environs: Mapping[str, str]
) -> AsyncIterator[list[GatewayProcess]]:
    """Run one gateway for each environment, on one broker."""
    broker = BrokerProcess(folder / "broker")
    gateways = [
        GatewayProcess(folder / f"data-{number}", broker.address, environ) for number, environ in enumerate(environs)
    ]
    try:
        await asyncio.to_thread(broker.start)
        async with bus_view(broker.address, folder / "data") as view:
            await view.producer.send(routing(VERSION))
            await view.producer.send(_heartbeat(replica_url))
            for gateway in gateways:
                await asyncio.to_thread(gateway.start)
                await asyncio.to_thread(wait_healthy, gateway.url)
            yield gateways
    finally:
        for gateway in gateways:
            gateway.stop()
        broker.stop()


def _heartbeat(url: str) -> Replica:
    return FakeReplica("replica", url=url).heartbeat(ttl_s=3600.0)


def _litellm(stack: contextlib.AsyncExitStack, folder: Path, replica_url: str) -> str:
    port = free_port()
    params = {"model": f"openai/{VERSION}", "api_base": f"{replica_url}/v1", "api_key": "none"}
    config = folder / "litellm.yaml"  # JSON is YAML
    config.write_text(json.dumps({"model_list": [{"model_name": "tiny", "litellm_params": params}]}))
    program = presence.CLIENTS.parent / "litellm"
    command = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    _start(stack, command, folder, LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_LOG="ERROR", LITELLM_MASTER_KEY=_KEY)
    return f"http://127.0.0.1:{port}"


def _start(stack: contextlib.AsyncExitStack, command: list[str], folder: Path, **environ: str) -> None:
    log = stack.enter_context((folder / "log").open("ab"))
    process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | environ)
    stack.callback(process.wait)
    stack.callback(process.kill)


async def _wait_until_answering(way: Way) -> None:
    """Wait until a first call was answered."""
    deadline = time.monotonic() + _START_S
    async with aiohttp.ClientSession() as http:
        while True:
            try:
                await way.call(http, -1, "plain")
                return
            except (aiohttp.ClientError, RuntimeError, OSError) as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{way.name} does not answer: {error}") from error
            await asyncio.sleep(0.2)


def import_s() -> float:
    """Return the seconds of an interpreter that only imports the client, including its start: the best of several."""
    took = []
    for _ in range(_IMPORTS):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", "from headrace import Client"], check=True)
        took.append(time.perf_counter() - began)
    return round(min(took), 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300, help="calls of each mode and route")
    parser.add_argument("--report", type=Path, default=Path("reports/bench-gateway_overhead.json"))
    parser.add_argument("--pairs", type=int, default=8, help="blocks of calls with and without the tuning")
    parser.add_argument("--block-s", type=float, default=5.0, help="seconds of each block")
    parser.add_argument("--only", choices=("all", "dialects"), default="all", help="part that is measured")
    arguments = parser.parse_args()
    dialects = asyncio.run(measure_dialects(2 * arguments.pairs, max(10, arguments.calls // 3)))
    print(f"CPU time of the APIs, in ratio to chat: {json.dumps(dialects)}", flush=True)
    if arguments.only == "dialects":
        return 0 if _gateway_tuning.holds(dialects) else 1
    tuning = asyncio.run(measure_tuning(arguments.pairs, arguments.block_s))
    ways = asyncio.run(measure(arguments.calls))
    for name, result in ways.items():
        numbers = "  ".join(f"{mode} p50 {result[mode]['p50']:7.2f} p99 {result[mode]['p99']:7.2f}" for mode in MODES)
        print(f"{name:14} {numbers} ms", flush=True)
    above = {mode: round(ways["gateway"][mode]["p50"] - ways["bare proxy"][mode]["p50"], 2) for mode in MODES}
    imported_s = import_s()
    tuned = all(tuning[f"{name}_ratio"] <= tuning[f"{name}_ratio_max"] for name in ("p99", "wake_ups"))
    is_within_limits = max(above.values()) <= ADDED_MS_MAX and imported_s <= IMPORT_S_MAX and tuned
    is_within_limits = is_within_limits and _gateway_tuning.holds(dialects)
    print(f"gateway above the bare proxy at p50: {above} ms; limit: {ADDED_MS_MAX:g} ms")
    print(f"from headrace import Client: {imported_s} s; limit: {IMPORT_S_MAX} s")
    print(f"with and without the runtime's tuning: {json.dumps(tuning)}")
    report = {
        "tuning": tuning,
        "dialects": dialects,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "calls": arguments.calls,
        "ms": ways,
        "above_bare_p50_ms": above,
        "wanted_ms_max": ADDED_MS_MAX,
        "import_s": imported_s,
        "import_s_max": IMPORT_S_MAX,
        "held": is_within_limits,
        "litellm": "LiteLLM proxy" in ways or "not installed: make install GROUP=clients",
    }
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if is_within_limits else 1


if __name__ == "__main__":
    sys.exit(main())
