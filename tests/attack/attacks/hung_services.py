"""SIGSTOP of every service of a real stack: each must be reported as hung, killed, restarted and ready, while calls go
on.

Two supervisors stand for two machines: the first starts all services, the second a twin of the gateway and of the
replica. Services are stopped in groups, to wait once per group; twins and the bus are in different groups.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from headrace_operations.supervisor import ServiceState, Supervisor, read
from headrace_schemas.http.stack_access import key_for
from tests.support import tiny_model
from tests.support.fake_llm import FakeLLM, verdict
from tests.system.program import Line, at_most, none_of

TITLE = "hung is not dead: every service is stopped (SIGSTOP) once"
MODEL = "hung"
SHOWN_S, RESTARTED_S = 10.0, 60.0
_READY_S = 240.0
_LOOK_S = 0.05
_CALL_S = 30.0
_PAUSE_S = 0.25
_WAVES = (("gateway", "inference"), ("gateway-2", "inference-2", "collector", "scorer", "judge", "trainer", "registry"))
_REPLICA: dict[str, object] = {
    "inference.ttl_s": 3,
    "inference.torch.device": "cpu",
}


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
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"question {self.calls_made}"}],
            "max_tokens": 4,
        }
        try:
            await http.get(f"{gateway}/health", timeout=2.0)  # as a balancer does
            answer = await http.post(f"{gateway}/v1/chat/completions", json=body)
        except httpx.HTTPError:
            return False
        return answer.status_code == 200


async def attack(folder: Path, rng: random.Random) -> list[Line]:
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
        none_of(
            "services that were not ready again", sum(recovery.ready_s > _READY_S for recovery in fates), len(fates)
        ),
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
