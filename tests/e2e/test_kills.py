"""kill -9 of each service in turn while a shortened `headrace demo` plays: it comes back, and the demo succeeds.

`headrace demo --short`, and a hand that kills its services one after the other while the agent works.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import HeadraceError
from headrace.registry import ModelRegistry
from headrace.topics import connected
from headrace_operations.supervisor import RunState, read
from headrace_operations.supervisor.overrides import toml
from tests.e2e.circle import CACHE, EXAMPLES
from tests.support.fake_llm import FakeLLM
from tests.support.processes import naming
from tests.support.service_process import HEADRACE, as_setting

WAIT_S = 180.0
"""Limit of most waits on a busy machine; usually seconds."""
BASE_S = 600.0
"""Limit with the base model to be built, which takes most of a minute on a quiet machine."""
LEARNING_S = 400.0
"""Limit for the demo's learning, which usually ends with the last kill."""
CONCURRENCY = 3
GAIN = 0.1
"""Required gain of held-out success, in 0..1, as in the shortened demo."""

ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1"}
"""One thread builds so small a model as fast as two, which wait for each other on a busy machine."""

TELLS = {
    "broker": "turns", "gateway": "turns", "inference": "turns", "collector": "trajectories", "scorer": "experiences",
    "trainer": "training-metrics", "registry": "model-events",
}  # fmt: skip
"""Topic on which the work of each service is visible. The judge's work is visible at its endpoint only."""


@dataclass
class Death:
    """One kill -9 and its effects."""

    service: str
    pid: int
    back_after_s: float = 0.0
    """From the kill to `ready`."""
    successor: int | None = None
    told_before: int = 0
    """Records on its topic when it was back."""
    told_again: bool = False


@dataclass
class Played:
    """The demo is over."""

    status: int
    output: str
    agent: dict[str, Any]
    report: dict[str, Any]
    deaths: dict[str, Death] = field(default_factory=dict)


def endless(example: Path, folder: Path) -> Path:
    """Copy of a demo whose agent works until it is stopped, whatever it has learned by then, on few tasks at a time, so
    that
    a killed process finds CPU time when it restarts.
    """
    parts = (example, folder), (example.parent / "example_parts", folder.parent / "example_parts")
    for folder_name, copy in parts:
        shutil.copytree(folder_name, copy, ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "demo.toml"
    recipe = tomllib.loads(path.read_text(encoding="utf-8"))
    recipe["short"] |= {"enough_gain": 2.0, "traffic_s_max": 10 * WAIT_S, "tasks": 0}
    recipe["agent"] += ["--concurrency", str(CONCURRENCY)]
    tables = {name: recipe.pop(name) for name in list(recipe) if isinstance(recipe[name], dict)}
    text = _entries(recipe) + "".join(f"[{name}]\n{_entries(table)}" for name, table in tables.items())
    path.write_text(text, encoding="utf-8")
    return folder


def _entries(table: Mapping[str, object]) -> str:
    return "".join(f"{name} = {toml(value)}\n" for name, value in table.items())


class KilledDemo:
    """One killed demo. Call `play` once. `folder` gets data, logs and the report. `other_counts` returns the work of
    services
    that are not in `TELLS`.
    """

    def __init__(
        self,
        demo: Path,
        folder: Path,
        cache: Path,
        settings: Mapping[str, object],
        other_counts: Mapping[str, Callable[[], int]],
    ) -> None:
        self.data, self._out, self._log = folder / "data", folder / "out", folder / "demo.log"
        self._command = [HEADRACE, "demo", str(demo), "--short", "--data-dir", str(self.data), "--out", str(self._out)]
        self._command += ["--cache", str(cache)]
        self._command += [word for name, value in settings.items() for word in ("--set", f"{name}={as_setting(value)}")]
        self._other_counts = other_counts
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        return self._log.read_text(encoding="utf-8")

    @property
    def left(self) -> dict[int, str]:
        """Processes that still know of this demo's data."""
        return naming(str(self.data))

    def play(self, order: tuple[str, ...]) -> Played:
        """Kill in `order`, see each one back at work, let the agent learn something, end."""
        with self._log.open("ab") as log:
            self._process = process = subprocess.Popen(self._command, stdout=log, stderr=log, env=ENVIRON)
        try:
            self._until(lambda: self._agent() is not None, "the agent is at work", BASE_S)
            self._until(lambda: self._tells("gateway") > 0, "the agent is answered")
            deaths = {name: self._kill(name) for name in order}
            for death in deaths.values():
                self._until(partial(self._has_told, death), f"{death.service} tells again")
                death.told_again = True
            self._until(self._has_learned, f"a version that took over is {GAIN:.0%} better than the first", LEARNING_S)
            agent = self._agent()
            assert agent is not None, self.output
            os.kill(agent, signal.SIGTERM)
            status = process.wait(WAIT_S)
        finally:
            process.kill()  # its services end with it
            process.wait()
        agent_said, report = (json.loads((self._out / name).read_text()) for name in ("agent.json", "demo.json"))
        return Played(status, self.output, agent_said, report, deaths)

    def _kill(self, name: str) -> Death:
        """SIGKILL, then wait until the service is ready again and the agent is answered."""
        before = self._state().services[name]
        assert before.pid is not None
        death, killed = Death(name, before.pid), time.monotonic()
        os.kill(before.pid, signal.SIGKILL)
        self._until(lambda: self._is_back(name, before.restarts), f"{name} is ready again")
        death.back_after_s, death.successor = time.monotonic() - killed, self._state().services[name].pid
        death.told_before, turns = self._tells(name), self._tells("gateway")
        self._until(lambda: self._tells("gateway") > turns, f"the agent is answered after {name} died")
        return death

    def _is_back(self, name: str, restarts: int) -> bool:
        service = self._state().services[name]
        return service.restarts > restarts and service.status == "ready"

    def _has_told(self, death: Death) -> bool:
        return self._tells(death.service) > death.told_before

    def _tells(self, service: str) -> int:
        """Records that are on the service's topic now; 0 while the bus is away."""
        if service in self._other_counts:
            return self._other_counts[service]()

        async def count() -> int:
            async with connected(self._state().bus) as topics:
                return sum((await topics.ends([TELLS[service]]))[TELLS[service]].values())

        try:
            return asyncio.run(count())
        except HeadraceError:
            return 0

    def _has_learned(self) -> bool:
        scores = self._promoted()
        return len(scores) > 1 and scores[-1] >= scores[0] + GAIN

    def _promoted(self) -> list[float]:
        """Held-out success of each version that was promoted, in order."""
        try:
            with ModelRegistry(self._state().services["registry"].url) as registry:
                (model,) = registry.models()
                versions = registry.versions(model.id)
        except HeadraceError:
            return []
        decisions = sorted(
            (decision for version in versions for decision in version.decisions), key=lambda decision: decision.time
        )
        scores = {
            decision.version: decision.statistics["score"] for decision in decisions if "score" in decision.statistics
        }
        return [
            scores[decision.version]
            for decision in decisions
            if decision.decision == "promoted" and decision.version in scores
        ]

    def _agent(self) -> int | None:
        """The agent's process."""
        pids = [pid for pid, command in naming(str(self._out)).items() if "email_agent.agent" in command]
        return pids[0] if pids else None

    def _state(self) -> RunState:
        return read(self.data)

    def _until(self, condition: Callable[[], bool], label: str, wait_s: float = WAIT_S) -> None:
        """Raises when it is not so in time, or the demo has ended."""
        deadline = time.monotonic() + wait_s
        while not condition():
            assert self._process is not None
            assert self._process.poll() is None, f"the demo ended before {label}: {self.output[-3000:]}"
            assert time.monotonic() < deadline, f"{label}: not after {wait_s} s: {self.output[-3000:]}"
            time.sleep(0.3)


pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ORDER = ("collector", "broker", "scorer", "gateway", "judge", "inference", "trainer", "registry")
EVALUATE = ["{python}", "-m", "email_agent.evaluate", "--base-url", "{base_url}", "--gate", "--tasks", "48"]


@pytest.fixture(scope="module")
def demo(judge_llm: FakeLLM, tmp_path_factory: pytest.TempPathFactory) -> KilledDemo:
    """The example's demo with its own base model and settings, a judge to kill, and half as many held-out tasks."""
    folder = tmp_path_factory.mktemp("killed")
    settings: dict[str, object] = {
        "bus.session_timeout_s": 6,  # the dead are missed sooner
        "registry.gate.command": EVALUATE,
        "registry.gate.audit_tasks": 48,
        "judge.endpoint.base_url": judge_llm.base_url,
        "judge.endpoint.model": "judge-1",
    }
    example = endless(EXAMPLES / "email_agent", folder / "email_agent")
    return KilledDemo(example, folder, CACHE, settings, {"judge": lambda: len(judge_llm.calls)})


@pytest.fixture(scope="module")
def played(demo: KilledDemo) -> Played:
    return demo.play(ORDER)


@pytest.mark.parametrize("service", ORDER)
def test_a_killed_service_comes_back_and_goes_on(played: Played, service: str) -> None:
    death = played.deaths[service]
    print(f"{service} was ready again after {death.back_after_s:.1f} s")
    assert death.successor not in (None, death.pid)
    assert f"{service} ended (signal 9); starting it again" in played.output
    assert death.told_again, "what it does shows on the bus again"


def test_the_demo_succeeds_all_the_same(played: Played) -> None:
    assert played.status == 0, played.output[-3000:]
    assert played.report["swaps"] >= 1
    assert played.report["after"] >= played.report["before"] + GAIN


def test_no_request_of_the_agent_failed(played: Played) -> None:
    assert played.agent["failures"] == []
    assert played.report["failed_requests"] == 0


def test_the_ledger_adds_up(played: Played) -> None:
    report = played.report
    dropped = sum(report["turns_dropped"].values())
    assert report["turns_captured"] == report["turns_trained"] + report["turns_waiting"] + dropped
    assert report["account_problems"] == []
    assert report["turns_captured"] >= played.agent["calls"], "whatever the agent was answered has been captured (P1)"
    assert report["turns_trained"] > 0


def test_nothing_is_left(demo: KilledDemo, played: Played) -> None:
    assert demo.left == {}
