"""Processes of a rollout test: two registries, a gateway, a replica and a broker, on one database.

The rig restarts each dead process, as a supervisor does, and records the events on the bus.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

from pydantic import SecretStr
from sqlalchemy import select

from headrace_registry.storage.tables import LEASE
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import TopicTable
from headrace_runtime.kafka.dead_letters import DeadLetterSender
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import BusSettings, Common, DatabaseSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database
from headrace_schemas import ModelEvent, Routing
from headrace_schemas.values.base import utcnow
from tests.integration.conftest import GATE
from tests.rollouts.mortal import FAULT, FOLDER
from tests.support import tiny_model
from tests.support.processes import free_port, wait_open
from tests.support.service_process import LoggedProcess


class KeptProcess(LoggedProcess):
    """A process that can be killed and restarted.

    `start` it, `kill` it (SIGKILL), and call `keep` repeatedly to restart it after its death.
    """

    def __init__(self, name: str, module: str, folder: Path, port: int, arguments: tuple[str, ...] = ()) -> None:
        super().__init__(name, module, folder / f"{name}.log", port, arguments)

    def start(self, settings: Mapping[str, object], environ: Mapping[str, str] | None = None) -> None:
        """Start the process with these settings, which also apply to restarts."""
        self.set(settings, environ)
        self.begin()

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def last_words(self) -> str:
        return self.log[-2000:] if self._log.exists() else ""

    def keep(self) -> None:
        if self._process is not None and not self.running():
            self.begin()

    def end(self) -> None:
        """Stop the process if it was started."""
        if self._process is not None:
            self.stop()


WAIT_S = 240.0
"""Limit of each wait in seconds, for a busy machine; usually a wait takes a second or two."""
_KEEP_S = 0.1
_LEASE_S = 30
"""Lease of the registry's leader in seconds: long enough for a leader without CPU time. A dead leader is detected at
once.
"""
ROLLOUT = {
    "KIND": "canary",
    "SHADOW_UNITS": 6,
    "SHADOW_DURATION_MAX_S": 40,
    "SHADOW__TENANTS": [{"tenant": "default"}],
    "SHADOW__PROMPTS_PER_MINUTE": 600,
    "STAGES": [{"share": "1/4", "units_min": 8}, {"share": "1/2"}],
    "EXPOSURE_MAX": "1/4",
    "EXPERIENCES": "exclude",
    "GUARDRAILS": [{"metric": "reward", "margin": 0.4, "weight": 8}, {"metric": "missing", "margin": 0.4}],
    "SUCCESSES": [{"metric": "reward", "margin": 0.4}],
    "UNEVEN": 0.6,
    "ALPHA": 0.2,
    "MATURITY_S": 1.0,
    "CLOSING_S": 1.5,
}


class RolloutRig:
    """Processes of a rollout test, made by `running()`. Every process that dies is restarted at once."""

    def __init__(self, folder: Path, bus: str, database_url: str, fault: str = "") -> None:
        self.folder = folder
        self.common = Common(
            data_dir=folder / "data",
            bus=BusSettings(address=bus),
            database=DatabaseSettings(url=SecretStr(database_url)),
        )
        self.blobs = BlobStore.open(self.common)
        # rewards of functions count from the scorer alone
        self.producer = EventProducer(self.common.bus, "headrace/scorer", self.blobs)
        self.database = Database.open("registry", self.common)
        self.bus = bus
        self.routings: list[Routing] = []
        """Every record of `routing`, in order."""
        self.decisions: list[ModelEvent] = []
        """Every record of `model-events`, in order."""
        self._database_url = database_url
        self._fault = fault
        self.gateway = KeptProcess("gateway", "headrace_gateway", folder, free_port())
        port = free_port()
        self.replica = KeptProcess("replica", "tests.rollouts.replica", folder, port, (str(folder), bus, str(port)))
        self.registries = [KeptProcess(f"registry-{n}", "tests.rollouts.mortal", folder, free_port()) for n in range(2)]
        self.trainer: KeptProcess | None = None

    @property
    def processes(self) -> list[KeptProcess]:
        return [*self.registries, self.gateway, self.replica, *([self.trainer] if self.trainer else [])]

    def start(self) -> None:
        (self.folder / "scores.json").write_text("{}", encoding="utf-8")  # every version plays equally well
        common = {"DATA_DIR": str(self.common.data_dir), "BUS__ADDRESS": self.bus}
        self.gateway.start({**common, "GATEWAY__PORT": self.gateway.port, "GATEWAY__UPSTREAM__HOLD_S": WAIT_S})
        self.replica.start(common)
        gate = [sys.executable, "-S", "-c", GATE, str(self.folder)]
        registry: dict[str, object] = {
            **common,
            "DATABASE__URL": self._database_url,
            "REGISTRY__POLL_S": 0.2,
            "REGISTRY__LEASE_S": _LEASE_S,
            "REGISTRY__GATE__COMMAND": gate,
            "REGISTRY__GATE__MARGIN": 0.4,
            "REGISTRY__GATE__ANCHOR_MARGIN": 0.4,
            "REGISTRY__GATE__AUDIT_TASKS": 2,
            "REGISTRY__GATE__BASE_URL": f"{self.gateway.url}/v1",
            **{f"REGISTRY__ROLLOUT__{name}": value for name, value in ROLLOUT.items()},
        }
        for process in self.registries:
            process.start({**registry, "REGISTRY__PORT": process.port}, {FOLDER: str(self.folder), FAULT: self._fault})

    def start_trainer(self, model: str, base: Path) -> KeptProcess:
        """Start a trainer that trains `model` from scratch and publishes a version after every four experiences."""
        self.trainer = KeptProcess(f"trainer-{model}", "headrace_trainer", self.folder, free_port())
        trainer_settings = {
            "BASE": str(base), "MODEL": model, "PORT": self.trainer.port, "BATCH_EXPERIENCES": 4,
            "BATCH_EXPERIENCES_MIN": 1, "BATCH_WAIT_S": 0.5, "STEPS_PER_VERSION": 1, "MAX_STALENESS": 9,
            "SAVE_INTERVAL_S": 0.5,
        }  # fmt: skip
        common = {"DATA_DIR": str(self.common.data_dir), "BUS__ADDRESS": self.bus}
        self.trainer.start({**common, **{f"TRAINER__{name}": value for name, value in trainer_settings.items()}})
        return self.trainer

    def stop_trainer(self) -> None:
        if self.trainer is not None:
            trainer, self.trainer = self.trainer, None
            trainer.stop()

    async def leader(self) -> KeptProcess:
        """Wait for the registry that holds the lease and runs, and return its process."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            async with self.database.transaction() as tx:
                holder = (await tx.execute(select(LEASE.c.holder))).scalar_one_or_none()
            pid = int(holder.split("|")[3]) if holder else 0
            leaders = [process for process in self.registries if process.pid == pid and process.running()]
            if leaders:
                return leaders[0]
            await asyncio.sleep(0.02)
        raise TimeoutError(f"no registry leads after {WAIT_S:g} s")

    async def publish(self, model: str, step: int, parent: str | None = None) -> str:
        """Publish a version whose weights no test reads."""
        manifest, ref = tiny_model.version(self.blobs, model, f"{model} {step}", step=step, parent=parent)
        await self.producer.send(tiny_model.checkpoint(manifest, ref, utcnow()))
        return manifest.version

    def routing(self, model: str) -> Routing | None:
        """Return the valid routing: the latest record with the highest revision."""
        candidates = [routing for routing in self.routings if routing.model == model]
        return max(reversed(candidates), key=lambda routing: routing.revision, default=None)

    def champion(self, model: str) -> str | None:
        routing = self.routing(model)
        return routing.champion if routing else None

    def decisions_about(self, model: str) -> list[ModelEvent]:
        """Return the decisions about a model without duplicates."""
        return list({decision.decision_id: decision for decision in self.decisions if decision.model == model}.values())

    def steps(self, version: str) -> list[str]:
        """Return the steps of a version's rollout in order, each with the stage after it."""
        decisions = self.decisions_about(version.partition("@")[0])
        return [
            f"{decision.rollout.kind} {decision.rollout.stage}"
            for decision in decisions
            if decision.rollout and decision.version == version
        ]

    async def until(self, condition: Callable[[], object], label: str, timeout_s: float = WAIT_S) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                last_words = "\n".join(f"{process.name}: {process.last_words[-600:]}" for process in self.processes)
                raise TimeoutError(f"{label}: not after {timeout_s:g} s\n{last_words}")
            await asyncio.sleep(0.02)

    async def keep(self) -> None:
        """Restart dead processes until cancelled."""
        while True:
            for process in self.processes:
                process.keep()
            await asyncio.sleep(_KEEP_S)

    def _routed(self, _key: str, event: Routing | None) -> None:
        if event is not None:
            self.routings.append(event)

    def _decided(self, _key: str, event: ModelEvent | None) -> None:
        if event is not None:
            self.decisions.append(event)

    @contextlib.asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Run the processes and read the bus during the block."""
        await topics.ensure(self.common.bus)
        await self.producer.start()
        refuse = DeadLetterSender("test", self.producer)
        routing = TopicTable(Routing, self.common.bus, "test-routing", self.blobs, refuse, self._routed)
        events = TopicTable(ModelEvent, self.common.bus, "test-events", self.blobs, refuse, self._decided)
        self.start()
        tasks = [asyncio.create_task(work) for work in (routing.run(), events.run(), self.keep())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            for process in self.processes:
                await asyncio.to_thread(process.end)
            await self.database.close()
            await self.producer.stop()


@contextlib.asynccontextmanager
async def running(folder: Path, database_url: str, fault: str = "") -> AsyncIterator[RolloutRig]:
    """Start the processes in `folder`, yield the rig, and stop them after the block."""
    broker = KeptProcess("broker", "headrace_broker", folder, free_port())
    settings = {"DATA_DIR": str(folder / "broker"), "BROKER__KAFKA_PORT": broker.port, "BROKER__PORT": 0}
    broker.start(settings)
    try:
        await asyncio.to_thread(wait_open, broker.port, WAIT_S)
        rig = RolloutRig(folder, f"127.0.0.1:{broker.port}", database_url, fault)
        async with rig.following():
            yield rig
    finally:
        broker.stop()
