"""The stack under fire: two machines as users have them, each with its own supervisor, and the bus between them.

Machine A is all that `headrace up` starts. Machine B adds a gateway and an inference replica that share A's bus and
blobs. The supervisors restart what dies; Apache Kafka, which no supervisor of ours runs, is started again here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp

from headrace.supervisor import Limits, Supervisor
from headrace_runtime.blobs import BlobStore
from headrace_trainer.store import LineageStore
from tests.chaos.balancer import Balancer, answers
from tests.chaos.ledgers import TrainerLedger
from tests.support.fake_llm import FakeLLM, verdict
from tests.support.kafka_node import KafkaNode
from tests.support.ports import free_port
from tests.support.processes import alive

MODEL = "chaos"
LINEAGE = "main"
PAIRS = {
    "gateway": "gateway-2",
    "gateway-2": "gateway",
    "inference": "inference-2",
    "inference-2": "inference",
}
"""While one of a pair is down, the other is spared."""
SERVICES = ("gateway", "gateway-2", "inference", "inference-2", "collector", "scorer", "judge", "trainer", "registry")
BUS = {"embedded": "broker", "kafka": "kafka"}
VICTIMS = {bus: (*SERVICES, name) for bus, name in BUS.items()}
_LIMITS = Limits(stable_s=5.0)
"""Who has lived for five seconds is started again at once: here dying often is no sign of being broken."""
_READY_S = 300.0
_CHECK_S = 0.1
REWARDS = """
def short(trajectory):
    return 1.0 if len(trajectory.final_answer) < 12 else 0.0
"""


@dataclass
class Stack:
    """Use as an async context manager. `folder` keeps everything, logs included, until the caller removes it."""

    folder: Path
    bus_kind: str
    base: Path
    report: Callable[[str], None] = lambda line: None
    _a: Supervisor = field(init=False)
    _b: Supervisor = field(init=False)
    _kafka: KafkaNode | None = None
    _judge: FakeLLM = field(default_factory=lambda: FakeLLM(verdict(outcome=4, grounding=4, conduct=3, clarity=5)))
    _http: aiohttp.ClientSession = field(init=False)
    _reviving: set[asyncio.Task[None]] = field(default_factory=set)
    crashes: list[str] = field(default_factory=list)
    """Deaths that nobody ordered."""

    async def __aenter__(self) -> Stack:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._http = aiohttp.ClientSession()
        self._judge.__enter__()
        try:
            address = await self._start_bus()
            self._a = self._machine_a(address)
            self._a.start()
            await asyncio.to_thread(self._a.wait_up, _READY_S)
            self._b = self._machine_b()
            self._b.start()
            await asyncio.to_thread(self._b.wait_up, _READY_S)
            await self.all_ready()
        except BaseException:
            await self.stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Stop whatever was started, the bus last. May be called again."""
        for task in self._reviving:
            task.cancel()
        await asyncio.gather(*self._reviving, return_exceptions=True)
        for machine in ("_b", "_a"):
            if (supervisor := getattr(self, machine, None)) is not None:
                await asyncio.to_thread(supervisor.stop)
        if self._kafka is not None:
            await asyncio.to_thread(self._kafka.stop)
        if not self._http.closed:
            self._judge.__exit__()
            await self._http.close()

    @property
    def bus(self) -> str:
        return self._a.plan.bus

    @property
    def gateways(self) -> tuple[str, str]:
        return self._a.url("gateway"), self._b.url("gateway")

    @property
    def blobs(self) -> BlobStore:
        return BlobStore((self.folder / "a" / "blobs").as_uri())

    async def kill(self, victim: str, balancer: Balancer) -> None:
        """SIGKILL, once the victim runs and its twin, if it has one, can stand in for it."""
        if victim in PAIRS:
            await self._until(partial(self._serves, PAIRS[victim]), f"{PAIRS[victim]} to stand in for {victim}")
        if victim in ("gateway", "gateway-2"):
            await self._until_running(victim)
            balancer.killing(self.url(victim))
        if self._kafka is not None and victim == BUS["kafka"]:
            await asyncio.gather(*self._reviving)
            self._kafka.kill()
            self._reviving = {asyncio.create_task(asyncio.to_thread(self._kafka.start, _READY_S))}
            return
        os.kill(await self._until_running(victim), signal.SIGKILL)

    async def all_ready(self) -> None:
        """Returns once every service says that it can do its work."""
        await asyncio.gather(*self._reviving)
        for name in (*SERVICES, *(["broker"] if self._kafka is None else [])):
            await self._until(partial(self._serves, name), f"{name} to be ready")

    def url(self, name: str) -> str:
        supervisor, service = self._find(name)
        return supervisor.url(service)

    def trainer_ledger(self) -> TrainerLedger:
        """What the last save holds. Call it when the trainer has stopped."""
        saved = LineageStore(self.blobs, LINEAGE).read()
        assert saved is not None, "the trainer never saved its lineage"
        return TrainerLedger(
            lineage=LINEAGE,
            contributions={name: tuple(c.step for c in one.contributions) for name, one in saved.window.items()},
            revisions={name: one.revisions for name, one in saved.window.items()},
            waiting=frozenset(item.experience.experience_id for item in saved.waiting),
            steps=saved.steps,
        )

    async def _start_bus(self) -> str | None:
        """The address of Kafka; None for the embedded broker, which machine A brings."""
        if self.bus_kind == "embedded":
            return None
        self._kafka = KafkaNode(self.folder / "kafka")
        await asyncio.to_thread(self._kafka.start, _READY_S)
        return self._kafka.address

    def _machine_a(self, address: str | None) -> Supervisor:
        rewards = self.folder / "rewards.py"
        rewards.write_text(REWARDS)
        bus = {"bus.address": address} if address else {"broker.kafka_port": free_port()}
        return self._machine("a", _settings(self.base, rewards, self._judge.base_url) | bus)

    def _machine_b(self) -> Supervisor:
        shared = {"bus.address": self.bus, "blobs.url": (self.folder / "a" / "blobs").as_uri()}
        return self._machine("b", _REPLICA | shared, only=("gateway", "inference"))

    def _machine(self, name: str, settings: dict[str, object], only: tuple[str, ...] = ()) -> Supervisor:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        return Supervisor(
            self.folder / name,
            settings=settings,
            only=only,
            auto_ports=True,
            environ=environ,
            limits=_LIMITS,
            report=lambda line: self._happened(f"machine {name}: {line}"),
        )

    def _happened(self, line: str) -> None:
        if " ended (" in line and f"(signal {signal.SIGKILL:d})" not in line:
            self.crashes.append(line.split(";")[0])
        self.report(line)

    def _find(self, name: str) -> tuple[Supervisor, str]:
        return (self._b, name.removesuffix("-2")) if name.endswith("-2") else (self._a, name)

    async def _serves(self, name: str) -> bool:
        """Whether it lives and says itself that it can do its work; a replica has also loaded a version."""
        self._alarm()
        if not await answers(self._http, f"{self.url(name)}/health", 2.0):
            return False
        if not name.startswith("inference"):
            return True
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(2.0), self._http.get(f"{self.url(name)}/v1/models") as response:
                return bool((await response.json())["data"])
        return False

    async def _until_running(self, name: str) -> int:
        """The process id of the victim's present life."""

        async def runs() -> bool:
            self._alarm()
            pid = self._pid(name)
            return pid is not None and alive(pid)

        await self._until(runs, f"{name} to run")
        pid = self._pid(name)
        assert pid is not None
        return pid

    def _pid(self, name: str) -> int | None:
        supervisor, service = self._find(name)
        return supervisor.pids.get(service)

    def _alarm(self) -> None:
        """Raises when a supervisor has given up."""
        for machine in ("_a", "_b"):
            if (supervisor := getattr(self, machine, None)) is not None:
                supervisor.wait(0)

    async def _until(self, condition: Callable[[], Awaitable[bool]], what: str) -> None:
        deadline = time.monotonic() + _READY_S
        while not await condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {_READY_S:g} s for {what}")
            await asyncio.sleep(_CHECK_S)


_REPLICA: dict[str, object] = {
    "inference.heartbeat_s": 0.5,
    "inference.ttl_s": 3,
    "inference.torch.device": "cpu",
}


def _settings(base: Path, rewards: Path, judge_url: str) -> dict[str, object]:
    """Machine A. Times are short where waiting shows nothing; bounds on loss, order and retries are as shipped."""
    return _REPLICA | {
        "collector.idle_s": 30,
        "scorer.functions": [f"{rewards}:short"],
        "scorer.required": ["feedback"],
        "scorer.settle_s": 15,
        "scorer.lease_s": 5,
        "judge.endpoint.base_url": judge_url,
        "judge.endpoint.model": "judge",
        "judge.sample_rate": 0.2,
        "judge.lease_s": 5,
        "trainer.base": base,
        "trainer.model": MODEL,
        "trainer.batch_experiences": 64,
        "trainer.batch_experiences_min": 1,
        "trainer.batch_wait_s": 3,
        "trainer.steps_per_version": 6,
        "trainer.save_interval_s": 3,
        "trainer.max_staleness": 64,
        "trainer.memory.window_experiences": 1_000_000,
        "trainer.optimizer.learning_rate": 1e-4,
        "trainer.compute.device": "cpu",
        "registry.lease_s": 3,
        "registry.probe_timeout_s": 60,
    }
