"""The stack of the chaos test: two machines, each with its own supervisor, and the bus between them.

Machine A runs the services that `headrace up` starts. Machine B adds a gateway, an inference replica and, if the
database is a server, a second process of each stream service; it shares the bus, blobs and database of A. The
supervisors restart dead services. Apache Kafka and PostgreSQL have no supervisor, so the test restarts them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import aiohttp

from headrace_operations.supervisor import Limits, Supervisor
from headrace_runtime.storage.blobs import BlobStore
from headrace_trainer.lineage.store import LineageStore
from tests.chaos.balancer import Proxy, answers
from tests.chaos.ledgers import TrainerLedger
from tests.chaos.nemeses import MACHINES, PAIRS, STREAM, services_on
from tests.support.fake_llm import FakeLLM, verdict
from tests.support.processes import alive, free_port
from tests.support.servers import KafkaNode, PostgresNode

MODEL = "chaos"
LINEAGE = "main"
_LIMITS = Limits(stable_s=5.0)
"""Lifetime in seconds after which a dead service is restarted at once: frequent deaths are no sign of a bug here."""
_KEY, _PASSWORD = "key-of-both-machines", "password-of-the-bus"
_KEYED = {"Authorization": f"Bearer {_KEY}"}
_READY_S = 300.0
_CHECK_S = 0.1
REWARDS = """
def short(trajectory):
    return 1.0 if len(trajectory.final_answer) < 12 else 0.0
"""


@dataclass
class Stack:
    """The processes of both machines, as an async context manager. `folder` keeps all files until the caller removes
    it.
    """

    folder: Path
    bus_kind: str
    base: Path
    report: Callable[[str], None] = lambda line: None
    environ_of: Callable[[str], Mapping[str, str]] = lambda machine: {}
    """Function that returns additional environment variables for the processes of a machine."""
    proxies: dict[str, Proxy] = field(default_factory=dict)
    """Proxies between each machine and Kafka."""
    crashes: list[str] = field(default_factory=list)
    """Processes that ended without a planned kill."""
    _a: Supervisor = field(init=False)
    _b: Supervisor = field(init=False)
    _kafka: KafkaNode | None = None
    _postgres: PostgresNode | None = None
    _judge: FakeLLM = field(default_factory=lambda: FakeLLM(verdict(outcome=4, grounding=4, conduct=3, clarity=5)))
    _http: aiohttp.ClientSession = field(init=False)
    _reviving: set[asyncio.Task[None]] = field(default_factory=set)

    async def __aenter__(self) -> Stack:
        self.folder.mkdir(parents=True, exist_ok=True)
        self._http = aiohttp.ClientSession()
        self._judge.__enter__()
        try:
            if self.bus_kind == "kafka":
                await self._start_kafka()
                await self._start_postgres()
            self._a = self._machine_a()
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
        """Stop all started processes, bus and database last. Repeated calls are allowed."""
        for task in self._reviving:
            task.cancel()
        await asyncio.gather(*self._reviving, return_exceptions=True)
        for machine in ("_b", "_a"):
            if (supervisor := getattr(self, machine, None)) is not None:
                await asyncio.to_thread(supervisor.stop)
        for proxy in self.proxies.values():
            await proxy.stop()
        for server in (self._kafka, self._postgres):
            if server is not None:
                await asyncio.to_thread(server.stop)
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

    # what a nemesis calls

    async def spare_twin(self, victim: str) -> None:
        """Wait until the victim's twin, if there is one, is healthy."""
        if victim in PAIRS:
            await self._until(partial(self._serves, PAIRS[victim]), f"{PAIRS[victim]} to stand in for {victim}")

    async def spare_other_machine(self, machine: str) -> None:
        """Wait until gateway and replica of the other machine are healthy."""
        for victim in ("gateway", "inference"):
            await self.spare_twin(victim if machine == "a" else f"{victim}-2")

    async def pid_of(self, victim: str) -> int:
        """Wait until the victim runs and return its process id."""

        async def runs() -> bool:
            self._alarm()
            pid = self._pid(victim)
            return pid is not None and alive(pid)

        await self._until(runs, f"{victim} to run")
        pid = self._pid(victim)
        assert pid is not None
        return pid

    @property
    def kafka_pid(self) -> int:
        assert self._kafka is not None
        return self._kafka.pid

    async def kill_kafka(self) -> None:
        kafka = self._kafka
        assert kafka is not None
        await asyncio.gather(*self._reviving)
        kafka.kill()
        self._reviving.add(asyncio.create_task(asyncio.to_thread(kafka.start, _READY_S)))

    async def kill_postgres(self) -> None:
        postgres = self._postgres
        assert postgres is not None
        await asyncio.gather(*self._reviving)
        postgres.kill()
        self._reviving.add(asyncio.create_task(asyncio.to_thread(postgres.start)))

    # what the run calls

    async def all_ready(self) -> None:
        """Return once every service reports that it is ready."""
        await asyncio.gather(*self._reviving)
        for name in (*services_on(self.bus_kind), *(["broker"] if self._kafka is None else [])):
            await self._until(partial(self._serves, name), f"{name} to be ready")

    def url(self, name: str) -> str:
        supervisor, service = self._find(name)
        return supervisor.url(service)

    def trainer_ledger(self) -> TrainerLedger:
        """Return the contributions in the trainer's last save. The trainer must have stopped."""
        saved = LineageStore(self.blobs, LINEAGE).read()
        assert saved is not None, "the trainer never saved its lineage"
        return TrainerLedger(
            lineage=LINEAGE,
            contributions={name: tuple(c.step for c in entry.contributions) for name, entry in saved.window.items()},
            revisions={name: entry.revisions for name, entry in saved.window.items()},
            waiting=frozenset(item.experience.experience_id for item in saved.waiting),
            steps=saved.steps,
        )

    async def _start_kafka(self) -> None:
        self.proxies = {machine: Proxy() for machine in MACHINES}
        self._kafka = KafkaNode(self.folder / "kafka", advertised=[proxy.port for proxy in self.proxies.values()])
        await asyncio.to_thread(self._kafka.start, _READY_S)
        for proxy, port in zip(self.proxies.values(), self._kafka.ports, strict=True):
            await proxy.start(port)

    async def _start_postgres(self) -> None:
        self._postgres = PostgresNode(self.folder / "postgres")
        await asyncio.to_thread(self._postgres.start)

    def _shared(self, machine: str) -> dict[str, object]:
        """Return the addresses of bus and database for both machines; empty where machine A runs its own."""
        if self._postgres is None:
            return {}
        address = f"127.0.0.1:{self.proxies[machine].port}"
        return {"bus.address": address, "database.url": self._postgres.url()}

    def _machine_a(self) -> Supervisor:
        rewards = self.folder / "rewards.py"
        rewards.write_text(REWARDS)
        bus = self._shared("a") or {"broker.kafka_port": free_port()}
        return self._machine("a", settings_of_machine_a(self.base, rewards, self._judge.base_url) | bus)

    def _machine_b(self) -> Supervisor:
        settings_a = settings_of_machine_a(self.base, self.folder / "rewards.py", self._judge.base_url)
        shared = self._shared("b") or {"bus.address": self.bus}
        shared |= {"blobs.url": (self.folder / "a" / "blobs").as_uri()}
        only = ("gateway", "inference", *(STREAM if self._postgres is not None else ()))
        selected = {name: value for name, value in settings_a.items() if name.split(".")[0] in only}
        return self._machine("b", selected | shared, only=only)

    def _machine(self, name: str, values: dict[str, object], only: tuple[str, ...] = ()) -> Supervisor:
        environ = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE_")}
        return Supervisor(
            self.folder / name,
            settings=values | self._secrets(),
            only=only,
            auto_ports=True,
            environ={**environ, **self.environ_of(name)},
            limits=_LIMITS,
            report=lambda line: self._happened(f"machine {name}: {line}"),
        )

    def _secrets(self) -> dict[str, object]:
        """Return the secrets that both machines share.

        Without Kafka, machine A's embedded broker is the bus of both.
        """
        login = {} if self._postgres is not None else {"bus.password": _PASSWORD}
        return {"security.internal_key": _KEY, **login}

    def _happened(self, line: str) -> None:
        if " ended (" in line and "(signal 9)" not in line:
            self.crashes.append(line.split(";")[0])
        self.report(line)

    def _find(self, name: str) -> tuple[Supervisor, str]:
        return (self._b, name.removesuffix("-2")) if name.endswith("-2") else (self._a, name)

    async def _serves(self, name: str) -> bool:
        """Return whether the service runs and reports that it is ready; a replica must also have loaded a version."""
        self._alarm()
        if not await answers(self._http, f"{self.url(name)}/health", 2.0):
            return False
        if not name.startswith("inference"):
            return True
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(2.0), self._http.get(f"{self.url(name)}/v1/models", headers=_KEYED) as response:
                return bool((await response.json())["data"])
        return False

    def _pid(self, name: str) -> int | None:
        supervisor, service = self._find(name)
        return supervisor.pids.get(service)

    def _alarm(self) -> None:
        """Raise an error if a supervisor has given up restarting a service."""
        for machine in ("_a", "_b"):
            if (supervisor := getattr(self, machine, None)) is not None:
                supervisor.wait(0)

    async def _until(self, condition: Callable[[], Awaitable[bool]], label: str) -> None:
        deadline = time.monotonic() + _READY_S
        while not await condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"waited {_READY_S:g} s for {label}")
            await asyncio.sleep(_CHECK_S)


def settings_of_machine_a(base: Path, rewards: Path, judge_url: str) -> dict[str, object]:
    """Return the settings of all services of machine A, with short waits and the default limits of loss, order and
    retries.

    Machine B uses the settings of the services that it runs.
    """
    return {
        "inference.ttl_s": 3,
        "inference.torch.device": "cpu",
        "collector.idle_s": 30,
        "scorer.functions": [f"{rewards}:short"],
        "scorer.required": ["feedback"],
        "scorer.reward_wait_s": 15,
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
