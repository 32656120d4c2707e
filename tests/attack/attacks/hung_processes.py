"""SIGSTOP of replicas, of the bus and of every service: hung processes are not dead."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import httpx2

from headrace_operations.supervisor import ServiceState, Supervisor, read
from headrace_runtime.errors import Unavailable
from headrace_schemas import Turn
from headrace_schemas.http.stack_access import key_for
from tests.attack.program import attack
from tests.attack.stacks import beside
from tests.support import tiny_model
from tests.support.fake_llm import FakeLLM, verdict
from tests.support.fake_replica import VERSION, FakeReplica, Generation, text_of
from tests.support.gateway import routing
from tests.support.processes import free_port, wait_open
from tests.support.servers import BrokerProcess
from tests.support.service_process import BusView, GatewayProcess, bus_view, wait_healthy
from tests.system.program import Line, at_most, none_of

AGENTS = 8
ROUNDS = 2
STOPPED_S = 20.0
"""Duration of a SIGSTOP, longer than any call may take: a call that waits for the process to resume is detected."""
RUNNING_S = 4.0
BEAT_S = 0.5
SLOWEST_S = 15.0
_TOKEN_S = 0.05
_PATIENCE_S = 120.0


@dataclass
class Load:
    """Observations of the agents."""

    calls: int = 0
    failures: list[str] = field(default_factory=list)
    wrong: int = 0
    slowest_s: float = 0.0
    delivered: set[str] = field(default_factory=set)


@attack("a replica that is stopped, not dead, and a bus that is")
async def hung_replica(folder: Path, rng: random.Random) -> list[Line]:
    """Stop one of two replicas, then the bus, under plain and streamed load: calls and streams must go on."""
    broker = BrokerProcess(folder / "broker")
    await asyncio.to_thread(broker.start)
    gateway = GatewayProcess(folder / "data", broker.address)
    replicas = {f"replica-{name}": free_port() for name in "ab"}
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(broker.stop)
        pids = {name: stack.enter_context(_replica(name, port)) for name, port in replicas.items()}
        for port in replicas.values():
            await asyncio.to_thread(wait_open, port, 20)
        view = await stack.enter_async_context(bus_view(broker.address, folder / "data"))
        stack.callback(gateway.stop)
        await view.producer.send(routing(VERSION))
        silent: set[str] = set()
        await stack.enter_async_context(_beating(view, replicas, silent))
        await asyncio.to_thread(gateway.start)
        await asyncio.to_thread(wait_healthy, gateway.url)
        load, bus_load = Load(), Load()
        async with _agents(gateway.url, load):
            await asyncio.sleep(RUNNING_S)
            calm = await _failures(gateway.url)
            for _ in range(ROUNDS):
                await _stop_one(pids, silent, rng)
                await asyncio.sleep(RUNNING_S)
        async with _agents(gateway.url, bus_load):
            await asyncio.sleep(RUNNING_S)
            with _stopped(broker.pid):
                await asyncio.sleep(STOPPED_S)
        lost = await _lost(view, load.delivered | bus_load.delivered)
    return [
        none_of("replicas given up while all of them ran", calm, load.calls),
        *_lines("a stopped replica", load),
        *_lines("a stopped bus", bus_load),
        none_of("answered calls without their turn", lost, len(load.delivered | bus_load.delivered)),
    ]


def _lines(name: str, load: Load) -> list[Line]:
    for failure in load.failures[:3]:
        print(f"    {name}: {failure[:300]}")
    return [
        none_of(f"{name}: failed calls", len(load.failures), load.calls),
        none_of(f"{name}: answers with other tokens", load.wrong, load.calls),
        at_most(f"{name}: slowest call", round(load.slowest_s, 1), SLOWEST_S, " s"),
    ]


async def _stop_one(pids: dict[str, int], silent: set[str], rng: random.Random) -> None:
    """Stop one replica with SIGSTOP for `STOPPED_S`.

    In half of the cases its heartbeats end, too; otherwise they go on, as if only the network to the replica were cut.
    """
    name = rng.choice(sorted(pids))
    if rng.random() < 0.5:
        silent.add(name)
    with _stopped(pids[name]):
        await asyncio.sleep(STOPPED_S)
    silent.discard(name)


@contextlib.contextmanager
def _stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _replica(name: str, port: int) -> Iterator[int]:
    command = [sys.executable, "-m", "tests.support.fake_replica", name, str(port), VERSION, str(_TOKEN_S)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:  # it tells of each caller that left
        try:
            yield process.pid
        finally:
            process.kill()


@contextlib.asynccontextmanager
async def _beating(view: BusView, replicas: dict[str, int], silent: set[str]) -> AsyncIterator[None]:
    fakes = [FakeReplica(name, url=f"http://127.0.0.1:{port}") for name, port in replicas.items()]

    async def beat() -> None:
        while True:
            for fake in fakes:
                if fake.replica_id not in silent:
                    with contextlib.suppress(Unavailable):  # the bus is stopped; the next one says the same
                        await view.producer.send(fake.heartbeat())
            await asyncio.sleep(BEAT_S)

    async with beside(beat()):
        yield


@contextlib.asynccontextmanager
async def _agents(url: str, load: Load) -> AsyncIterator[None]:
    """Send calls until the block ends, then wait for the open calls."""
    stop = asyncio.Event()

    async def agent(number: int) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=_PATIENCE_S) as client:
            turn = 0
            while not stop.is_set():
                turn += 1
                await _call(client, f"{url} {number} {turn} {id(load)}", stream=turn % 2 == 0, load=load)

    async with asyncio.TaskGroup() as group:
        for number in range(AGENTS):
            group.create_task(agent(number))
        try:
            yield
        finally:
            stop.set()


async def _call(client: httpx2.AsyncClient, text: str, *, stream: bool, load: Load) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": text}], "stream": stream}
    began = time.monotonic()
    load.calls += 1
    try:
        answer = await client.post("/v1/chat/completions", json=body)
    except httpx2.HTTPError as error:
        load.failures.append(repr(error))
        return
    finally:
        load.slowest_s = max(load.slowest_s, time.monotonic() - began)
    if answer.status_code != 200 or (stream and not answer.text.endswith("data: [DONE]\n\n")):
        load.failures.append(f"{answer.status_code} {answer.text[-500:]}")
        return
    load.delivered.add(answer.headers["x-request-id"])
    expected = "".join(map(text_of, Generation(body, VERSION).tokens(0)))
    load.wrong += answer_text(answer.text, stream=stream) != expected


def answer_text(text: str, *, stream: bool) -> str:
    if not stream:
        return str(json.loads(text)["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in text.split("\n\n")[:-2]]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


async def _lost(view: BusView, delivered: set[str]) -> int:
    """Return the number of answered calls whose turn is not on the bus after the spool had time to drain."""
    deadline = time.monotonic() + 30
    while True:
        missing = delivered - {turn.turn_id for turn in await view.read(Turn)}
        if not missing or time.monotonic() > deadline:
            return len(missing)
        await asyncio.sleep(0.5)


async def _failures(url: str) -> int:
    async with httpx2.AsyncClient() as client:
        lines = (await client.get(f"{url}/metrics")).text.splitlines()
    name = "headrace_gateway_upstream_failures_total{"
    return round(sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name)))


MODEL = "hung"
SHOWN_S, RESTARTED_S = 10.0, 60.0
_READY_S = 240.0
_LOOK_S = 0.05
_CALL_S = 30.0
_PAUSE_S = 0.25
_WAVES = (("gateway", "inference"), ("gateway-2", "inference-2", "collector", "scorer", "judge", "trainer", "registry"))
"""Services that are stopped together, to wait once per group. Twins and the bus are in different groups."""
_REPLICA: dict[str, object] = {"inference.ttl_s": 3, "inference.torch.device": "cpu"}


@dataclass
class Stack:
    """Both machines with their services. The name of a service on the second machine ends with `-2`."""

    first: Supervisor
    second: Supervisor

    def state(self, name: str) -> ServiceState:
        """Return the state of a service as `headrace status` reads it."""
        supervisor = self.second if name.endswith("-2") else self.first
        return read(supervisor.data_dir).services[name.removesuffix("-2")]

    @property
    def gateways(self) -> tuple[str, str]:
        return self.first.url("gateway"), self.second.url("gateway")


@dataclass
class Recovery:
    """How one service recovered: seconds from its SIGSTOP to each stage."""

    name: str
    shown_s: float = float("inf")
    restarted_s: float = float("inf")
    ready_s: float = float("inf")


@dataclass
class Calls:
    """An agent with two gateways: a call that one gateway does not answer is sent to the other."""

    gateways: tuple[str, str]
    calls_made: int = 0
    failed: list[str] = field(default_factory=list)
    slowest_s: float = 0.0

    async def run(self) -> None:
        """Make calls until cancelled."""
        async with httpx.AsyncClient(timeout=_CALL_S) as http:
            while True:
                began = time.monotonic()
                first = self.gateways[self.calls_made % 2]
                second = self.gateways[(self.calls_made + 1) % 2]
                if not (await self._call(http, first) or await self._call(http, second)):
                    self.failed.append(f"call {self.calls_made}")
                self.calls_made += 1
                self.slowest_s = max(self.slowest_s, time.monotonic() - began)
                await asyncio.sleep(_PAUSE_S)

    async def _call(self, http: httpx.AsyncClient, gateway: str) -> bool:
        messages = [{"role": "user", "content": f"question {self.calls_made}"}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 4}
        try:
            await http.get(f"{gateway}/health", timeout=2.0)  # as a balancer does
            answer = await http.post(f"{gateway}/v1/chat/completions", json=body)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200


@attack("hung is not dead: every service is stopped (SIGSTOP) once")
async def hung_services(folder: Path, rng: random.Random) -> list[Line]:
    """Stop every service: each must be reported as hung, killed, restarted and ready, while calls go on."""
    fates: list[Recovery] = []
    async with stack(folder, rng) as started:
        calls = Calls(started.gateways)
        calling = asyncio.create_task(calls.run())
        waves = [list(wave) for wave in _WAVES]
        rng.shuffle(waves)
        try:
            for wave in [*waves, ["broker"]]:
                rng.shuffle(wave)
                fates += await asyncio.gather(*(_stop(started, name, rng.uniform(0, 3)) for name in wave))
                await _all_ready(started)
        finally:
            calling.cancel()
            await asyncio.gather(calling, return_exceptions=True)
    for recovery in fates:
        print(f"    {recovery.name}: hung after {recovery.shown_s:.1f} s, started again {recovery.restarted_s:.1f}, "
              f"ready {recovery.ready_s:.1f}", flush=True)  # fmt: skip
    return [
        at_most(
            f"{len(fates)} services, the slowest until it is shown as hung", _worst(fates, "shown_s"), SHOWN_S, " s"
        ),
        at_most("the slowest until it is started again", _worst(fates, "restarted_s"), RESTARTED_S, " s"),
        none_of("services that were not ready again", sum(fate.ready_s > _READY_S for fate in fates), len(fates)),
        none_of("calls that no gateway answered meanwhile", len(calls.failed), calls.calls_made),
    ]


async def _stop(started: Stack, name: str, delay_s: float) -> Recovery:
    await asyncio.sleep(delay_s)
    before = started.state(name)
    assert before.pid is not None
    recovery, began = Recovery(name), time.monotonic()
    os.kill(before.pid, signal.SIGSTOP)

    async def after(condition: Callable[[ServiceState], bool]) -> float:
        while not condition(started.state(name)):
            if time.monotonic() - began > _READY_S:
                return float("inf")
            await asyncio.sleep(_LOOK_S)
        return round(time.monotonic() - began, 1)

    recovery.shown_s = await after(lambda state: state.status == "hung")
    recovery.restarted_s = await after(
        lambda state: state.restarts > before.restarts and state.pid not in (None, before.pid)
    )
    recovery.ready_s = await after(lambda state: state.status == "ready" and state.pid != before.pid)
    with contextlib.suppress(ProcessLookupError):  # what nobody killed is not left stopped
        if started.state(name).pid == before.pid:
            os.kill(before.pid, signal.SIGCONT)
    return recovery


def _worst(fates: list[Recovery], figure: str) -> float:
    return max(float(getattr(recovery, figure)) for recovery in fates)


async def _all_ready(started: Stack) -> None:
    for supervisor in (started.first, started.second):
        await asyncio.to_thread(supervisor.wait_ready, _READY_S)


@contextlib.asynccontextmanager
async def stack(folder: Path, rng: random.Random) -> AsyncIterator[Stack]:
    """Start a stack and wait until both replicas serve a version."""
    base = await asyncio.to_thread(tiny_model.build, folder / "base", seed=rng.randrange(2**31))
    rewards = folder / "rewards.py"
    rewards.write_text("def short(trajectory):\n    return float(len(trajectory.final_answer) < 12)\n")
    with FakeLLM(verdict(outcome=4, grounding=4, conduct=3, clarity=5)) as judge, contextlib.ExitStack() as running:
        settings: dict[str, object] = _REPLICA | {
            "scorer.functions": [f"{rewards}:short"],
            "judge.endpoint.base_url": judge.base_url,
            "judge.endpoint.model": "judge",
            "trainer.base": base,
            "trainer.model": MODEL,
            "trainer.batch_experiences": 1024,  # nothing new is to be served meanwhile
            "trainer.memory.queue_experiences": 2048,
            "trainer.batch_experiences_min": 1024,
            "trainer.compute.device": "cpu",
        }
        first = _machine(folder / "a", settings)
        running.callback(first.stop)
        first.start()
        await asyncio.to_thread(first.wait_ready, _READY_S)
        shared: dict[str, object] = {"bus.address": first.plan.bus, "blobs.url": (folder / "a" / "blobs").as_uri()}
        shared["security.internal_key"] = first.internal_key
        second = _machine(folder / "b", _REPLICA | shared, only=("gateway", "inference"))
        running.callback(second.stop)
        second.start()
        await asyncio.to_thread(second.wait_ready, _READY_S)
        await _serving(second.url("inference"))
        yield Stack(first, second)


async def _serving(replica: str) -> None:
    deadline, keyed = time.monotonic() + _READY_S, {"Authorization": f"Bearer {key_for(replica)}"}
    async with httpx.AsyncClient(timeout=5.0) as http:
        while True:
            with contextlib.suppress(httpx.HTTPError):
                if (await http.get(f"{replica}/v1/models", headers=keyed)).json()["data"]:
                    return
            if time.monotonic() > deadline:
                raise TimeoutError(f"{replica} serves no version after {_READY_S:g} s")
            await asyncio.sleep(0.2)


def _machine(folder: Path, settings: dict[str, object], only: tuple[str, ...] = ()) -> Supervisor:
    environ = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
    return Supervisor(folder, settings=settings, only=only, auto_ports=True, environ=environ)
