"""Cost of a turn in long sessions: `python -m benchmarks.sessions`. Writes `reports/bench-sessions.json`.

An agent extends one conversation turn by turn, as coding agents do, through the gateway, the embedded broker, the
collector and the scorer, each a process of its own, on a replica without a model. For sessions of several lengths the
benchmark measures per turn the CPU time of each process, the bytes of the topic `turns` with their blobs, and the bytes
of the session in the databases of collector and scorer before and after its end. CPU time does not include that of
idle processes, which is measured first. The cost of a turn after its capture in the longest session must be at most
twice that in the shortest one, and each session must become one trajectory with one branch. The gateway also reads the
whole conversation of each request and the whole prompt of each answer, so its CPU time may grow by a multiple of the
time that the standard library takes to decode them. The exit status is 1 if a limit does not hold. About four minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from benchmarks import _sessions_replica
from benchmarks._gateway_tuning import cpu_s
from headrace_cli.terminal import ProgressDisplay
from headrace_runtime.kafka.consumer import record_of
from headrace_runtime.kafka.wire import Record, decode
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Experience, Trajectory, Turn
from headrace_schemas.events.envelope import is_blob_reference
from headrace_schemas.values.blobs import BlobRef
from tests.support.fake_replica import VERSION, FakeReplica
from tests.support.gateway import routing
from tests.support.processes import free_port, wait_open
from tests.support.servers import BrokerProcess
from tests.support.service_process import BusView, GatewayProcess, ServiceProcess, bus_view, read_topic, wait_healthy

RATIO_MAX = 2.0
DECODINGS_MAX = 8.0
"""Growth of the gateway's CPU time per turn, in multiples of that of decoding the request and the replica's answer."""
LENGTHS = (20, 200, 2000)
_TURNS_MIN = 200
"""Minimum number of measured turns; short sessions are repeated until it is reached."""
_OPENING_BYTES = 4096
_MESSAGE_BYTES = 24
_ARRIVAL_S = 120.0
_IDLE_S = 10.0
_TOKENS_PER_S = 1e9
"""Token limit of the gateway per second, above what one client sends."""
_DECODED = 20
"""Number of turns of a session whose JSON is decoded."""
AFTER_CAPTURE = ("broker_cpu_ms", "collector_cpu_ms", "scorer_cpu_ms", "topic_bytes", "state_open", "state_closed")
"""Measurements with a limit."""


@dataclass
class Stack:
    """The running processes and their folders."""

    folder: Path
    view: BusView
    bus: BusSettings
    gateway: GatewayProcess
    broker: BrokerProcess
    services: Mapping[str, ServiceProcess]
    replica_url: str

    async def serve(self, version: str, revision: int = 1) -> None:
        """Route all calls to a version, of which the replica plays the answers."""
        await self.view.producer.send(routing(version, revision=revision))
        replica = FakeReplica("replica", versions=(version,), url=self.replica_url)
        await self.view.producer.send(replica.heartbeat(ttl_s=3600.0))

    @property
    def blobs(self) -> BlobStore:
        return BlobStore(f"file://{self.folder}/data/blobs")

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU time of each process so far."""
        pids = {"gateway": self.gateway.pid, "broker": self.broker.pid}
        pids |= {name: service.pid for name, service in self.services.items()}
        return {name: cpu_s(pid) for name, pid in pids.items()}

    def state_bytes(self) -> int:
        """Return the bytes of all rows of collector and scorer."""
        return sum(_row_bytes(self.folder / "data" / "db" / f"{name}.sqlite") for name in self.services)

    async def idle_rates(self) -> dict[str, float]:
        """Return the share of a core that each process uses while it has no work."""
        before, began_s = self.cpu_s(), time.monotonic()
        await asyncio.sleep(_IDLE_S)
        wall_s = time.monotonic() - began_s
        return {name: (seconds - before[name]) / wall_s for name, seconds in self.cpu_s().items()}

    async def events(self, topic: str, session_ids: Collection[str]) -> list[Any]:
        """Return the events of sessions on a topic."""
        events = []
        for message in await read_topic(self.bus, topic):
            event: Any = (await decode(record_of(message), self.blobs)).event
            if event.session_id in session_ids:
                events.append(event)
        return events

    async def topic_bytes(self, session_keys: Collection[str]) -> int:
        """Return the bytes of the sessions' turns on the bus, and of the blobs that they refer to."""
        records = map(record_of, await read_topic(self.bus, Turn.topic))
        return sum(_record_bytes(record) for record in records if (record.key or b"").decode() in session_keys)


@contextlib.asynccontextmanager
async def running(folder: Path) -> AsyncIterator[Stack]:
    """Run all processes until the body ends."""
    port = free_port()
    command = [sys.executable, "-m", "benchmarks._sessions_replica", str(port)]
    broker = BrokerProcess(folder / "broker")
    gateway = GatewayProcess(
        folder / "data",
        broker.address,
        GATEWAY__LIMITS_TOTAL__TOKENS_PER_S=_TOKENS_PER_S,
        GATEWAY__LIMITS_PER_KEY__TOKENS_PER_S=_TOKENS_PER_S,
    )
    services = {
        "collector": ServiceProcess("collector", folder / "data", broker.address),
        "scorer": ServiceProcess("scorer", folder / "data", broker.address, SCORER__REQUIRED='["feedback"]'),
    }
    replica = await asyncio.to_thread(_start, command, folder / "replica.log")
    try:
        await asyncio.to_thread(wait_open, port, 60)
        await asyncio.to_thread(broker.start)
        async with bus_view(broker.address, folder / "data") as view:
            stack = Stack(folder, view, view.settings, gateway, broker, services, f"http://127.0.0.1:{port}")
            await stack.serve(VERSION)
            await asyncio.to_thread(gateway.start)
            await asyncio.to_thread(wait_healthy, gateway.url)
            for service in services.values():
                await asyncio.to_thread(service.start)
            yield stack
    finally:
        for service in services.values():
            service.stop()
        gateway.stop()
        broker.stop()
        replica.kill()
        replica.wait()


def _start(command: Sequence[str], log_path: Path) -> subprocess.Popen[bytes]:
    with log_path.open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


@dataclass
class Conversation:
    """An agent that extends one conversation call by call, and sends all of it each time."""

    stack: Stack
    http: aiohttp.ClientSession
    session_id: str
    opening_bytes: int = _OPENING_BYTES
    message_bytes: int = _MESSAGE_BYTES
    messages: list[dict[str, str]] = field(default_factory=list)
    response_ids: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rules = "Read the rules before you act. " * (self.opening_bytes // 24)
        opening = f"You are an agent of session {self.session_id}. {rules}"
        self.messages.append({"role": "system", "content": opening[: self.opening_bytes]})

    async def call(self, attempts: int = 1) -> None:
        """Make the next call. A lost connection or a refusal with status 503 is tried again, up to `attempts` times."""
        result = f"result {len(self.response_ids)}: ".ljust(self.message_bytes, "x")
        messages = [*self.messages, {"role": "user", "content": result}]
        headers = {"x-session-id": self.session_id}
        url, body = f"{self.stack.gateway.url}/v1/chat/completions", {"model": "tiny", "messages": messages}
        for remaining in reversed(range(attempts)):
            try:
                async with self.http.post(url, json=body, headers=headers) as response:
                    status, answer = response.status, await response.json()
            except aiohttp.ClientError as error:
                status, answer = 503, {"error": repr(error)}
            if status == 200:
                break
            if status != 503 or not remaining:
                raise RuntimeError(f"{self.session_id}: {status} {answer}")
            await asyncio.sleep(0.5)
        self.response_ids.append(answer["id"])
        content = answer["choices"][0]["message"]["content"]
        self.messages = [*messages, {"role": "assistant", "content": content}]


async def play(stack: Stack, http: aiohttp.ClientSession, session_id: str, turns: int) -> Conversation:
    """Play a session of so many turns."""
    conversation = Conversation(stack, http, session_id)
    for _ in range(turns):
        await conversation.call()
    return conversation


async def end_session(stack: Stack, http: aiohttp.ClientSession, session_id: str) -> None:
    """Send the reward of a session and end it."""
    body = {"session_id": session_id, "value": 1.0, "ends_session": True}
    async with http.post(f"{stack.gateway.url}/v1/feedback", json=body) as response:
        response.raise_for_status()


def session_key(response_ids: Sequence[str]) -> str:
    """Return the key of the session of these responses."""
    return response_ids[0].split("-")[1]


async def measure(
    stack: Stack, http: aiohttp.ClientSession, turns: int, sessions: int, idle_rates: Mapping[str, float]
) -> dict[str, Any]:
    """Play sessions of so many turns, and return the cost of a turn."""
    state, cpu, began_s = stack.state_bytes(), stack.cpu_s(), time.monotonic()
    names = [f"{turns}-{number}" for number in range(sessions)]
    played = {name: await play(stack, http, name, turns) for name in names}
    played_ids = {name: conversation.response_ids for name, conversation in played.items()}
    await _wait_for_turns(stack, sessions * turns)
    open_state = stack.state_bytes()
    for name in names:
        await end_session(stack, http, name)
    await wait_for_experiences(stack, names)
    wall_s = time.monotonic() - began_s
    spent = {
        name: max(0.0, seconds - cpu[name] - wall_s * idle_rates.get(name, 0.0))
        for name, seconds in stack.cpu_s().items()
    }
    calls = sessions * turns
    topic_bytes = await stack.topic_bytes({session_key(ids) for ids in played_ids.values()})
    trajectories: list[Trajectory] = await stack.events(Trajectory.topic, names)
    by_session = {name: [item for item in trajectories if item.session_id == name] for name in names}
    return {
        "sessions": sessions,
        **{f"{name}_cpu_ms": round(1e3 * seconds / calls, 3) for name, seconds in spent.items()},
        "decoding_cpu_ms": round(decoding_cpu_ms(played[names[0]].messages), 3),
        "topic_bytes": round(topic_bytes / calls),
        "state_open": round((open_state - state) / calls),
        "state_closed": round((stack.state_bytes() - state) / calls),
        "whole": all(_is_whole(by_session[name], ids) for name, ids in played_ids.items()),
    }


def decoding_cpu_ms(messages: Sequence[Mapping[str, str]]) -> float:
    """Return the mean CPU time of decoding the JSON of a turn's request and of its replica's answer."""
    total_s = 0.0
    for number in range(_DECODED):
        prompt = [*messages[: 2 + 2 * (number * (len(messages) // 2) // _DECODED)]]
        request = json.dumps({"model": "tiny", "messages": prompt})
        answer = json.dumps({"prompt_token_ids": _sessions_replica.prompt_of([*map(dict, prompt)])})
        began_s = time.process_time()
        json.loads(request)
        json.loads(answer)
        total_s += time.process_time() - began_s
    return 1e3 * total_s / _DECODED


async def _wait_for_turns(stack: Stack, count: int) -> None:
    """Wait until the collector has stored the turns of all sessions that were played now."""
    path = stack.folder / "data" / "db" / "collector.sqlite"
    deadline = time.monotonic() + _ARRIVAL_S
    while _query(path, "SELECT count(*) FROM turns WHERE closed_ms IS NULL") < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the collector did not store {count} turns in {_ARRIVAL_S:g} s")
        await asyncio.sleep(0.1)


async def wait_for_experiences(stack: Stack, session_ids: Collection[str]) -> None:
    """Wait until the scorer has published the experiences of sessions."""
    deadline = time.monotonic() + _ARRIVAL_S
    while True:
        published = {event.session_id for event in await stack.events(Experience.topic, session_ids)}
        missing = sorted(set(session_ids) - published)
        if not missing:
            return
        if time.monotonic() > deadline:
            raise TimeoutError(f"session {missing[0]} did not become an experience in {_ARRIVAL_S:g} s")
        await asyncio.sleep(0.5)


def _is_whole(trajectories: Sequence[Trajectory], ids: Sequence[str]) -> bool:
    """Return whether a session became one trajectory with one branch, in which each turn has one span."""
    branches = [branch for trajectory in trajectories for branch in trajectory.branches]
    spans = [(span.turn_id, span.stop - span.start) for branch in branches for span in branch.spans]
    is_one = len(trajectories) == len(branches) == 1
    return is_one and spans == [(name, _sessions_replica.ANSWER_TOKENS) for name in ids]


def _row_bytes(path: Path) -> int:
    """Return the bytes of the values in all rows of a database."""
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        tables = [row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        total = 0
        for table in tables:
            columns = [row[1] for row in database.execute(f'PRAGMA table_info("{table}")')]
            lengths = " + ".join(f'coalesce(length("{column}"), 0)' for column in columns)
            total += database.execute(f'SELECT coalesce(sum({lengths}), 0) FROM "{table}"').fetchone()[0]
    return int(total)


def _query(path: Path, statement: str, *values: str) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        return int(database.execute(statement, values).fetchone()[0])


def _record_bytes(record: Record) -> int:
    size = len(record.value or b"") + sum(len(name) + len(value or b"") for name, value in record.headers)
    if is_blob_reference(record.headers):
        size += BlobRef.model_validate_json(record.value or b"").size
    return size


async def run(lengths: Sequence[int]) -> dict[int, dict[str, Any]]:
    results = {}
    folder = Path(tempfile.mkdtemp(prefix="headrace-bench-"))
    try:
        async with running(folder) as stack, aiohttp.ClientSession() as http:
            await measure(stack, http, 5, 1, {})  # the first calls open connections and compile
            idle_rates = await stack.idle_rates()
            for turns in lengths:
                with ProgressDisplay(f"bench-sessions, {turns} turns", activity="playing"):
                    results[turns] = await measure(stack, http, turns, max(1, _TURNS_MIN // turns), idle_rates)
                print(f"{turns:5} turns: {json.dumps(results[turns])}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, nargs="+", default=LENGTHS, help="lengths of the sessions, ascending")
    parser.add_argument("--report", type=Path, default=Path("reports/bench-sessions.json"))
    arguments = parser.parse_args()
    results = asyncio.run(run(arguments.turns))
    short, long = results[arguments.turns[0]], results[arguments.turns[-1]]
    ratios = {name: round(long[name] / max(short[name], 1e-3), 2) for name in (*AFTER_CAPTURE, "gateway_cpu_ms")}
    growth = {name: long[name] - short[name] for name in ("gateway_cpu_ms", "decoding_cpu_ms")}
    decodings = round(growth["gateway_cpu_ms"] / max(growth["decoding_cpu_ms"], 1e-3), 2)
    over = [name for name in AFTER_CAPTURE if ratios[name] > RATIO_MAX]
    over += ["gateway_cpu_ms"] if decodings > DECODINGS_MAX else []
    holds = not over and all(result["whole"] for result in results.values())
    print(f"ratios of {arguments.turns[-1]} to {arguments.turns[0]} turns: {json.dumps(ratios)}")
    print(f"growth of the gateway's CPU time: {decodings:g} times that of decoding")
    print(f"limits: {RATIO_MAX:g} after the capture, {DECODINGS_MAX:g} decodings")
    print(f"exceeded by: {', '.join(over) or 'none'}")
    report = {
        "machine": {"cores": os.cpu_count(), "python": platform.python_version()},
        "per_turn": results,
        "ratios": ratios,
        "ratio_max": RATIO_MAX,
        "gateway_decodings": decodings,
        "gateway_decodings_max": DECODINGS_MAX,
        "held": holds,
    }
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
