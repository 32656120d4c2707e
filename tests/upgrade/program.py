"""A data directory written by an earlier commit, opened by this one: it serves, trains on and accounts for every turn.

The earlier commit is checked out next to this one and gets an environment of its own from its own lock.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import openai
from aiokafka import AIOKafkaProducer

from headrace.registry import ModelRegistry
from headrace.rollouts import Rollouts
from headrace.topics import Range, connected
from headrace_operations.from_topics import read_turn_account
from headrace_operations.turn_account import TurnAccount
from headrace_schemas import Checkpoint, DeadLetter, Event, Feedback, TrainingMetrics
from tests.e2e import circle
from tests.e2e.circle import MODEL
from tests.support.fake_llm import FakeLLM, verdict
from tests.support.servers import PostgresNode, missing_postgres
from tests.support.service_process import HEADRACE, HeadraceUp, as_setting
from tests.system.program import ROOT, Line, Program, Run, at_least, equals

COMMIT = "a7fe9434"
"""The last commit before files, distributions and names got their present form."""
LEFT_OUT = {"examples", "tests", "docs"}
"""Folders whose projects are no members."""
DATABASES = ("sqlite", "postgres")
PROMOTIONS = 2
STEPS = 2
INVALID = 3
WAIT_S = 180.0
START_S = 600.0
"""The first start of a new environment reads several GB of libraries."""
CANARY: dict[str, object] = {"registry.rollout.kind": "canary"}
UV = Path(sys.prefix) / "bin" / "uv"
E = TypeVar("E", bound=Event)


@dataclass(frozen=True)
class Checkout:
    """An earlier commit with an environment of its own."""

    folder: Path

    @property
    def headrace(self) -> str:
        return str(self.folder / ".venv" / "bin" / "headrace")

    @classmethod
    def make(cls, commit: str, folder: Path) -> Checkout:
        """Check `commit` out to `folder` and install its members from its lock. Takes about a minute."""
        _run("git", "worktree", "add", "--detach", str(folder), commit, cwd=ROOT)
        environment = folder / ".venv"
        venv.create(environment, with_pip=False, symlinks=True)
        python = ("--python", str(environment / "bin" / "python"))
        sync = str(UV), "pip", "sync", "--quiet", "--compile-bytecode", "--require-hashes"  # services start at once
        _run(*sync, *python, "requirements.lock", cwd=folder)
        projects = _run("git", "ls-files", "*/pyproject.toml", cwd=folder).split()
        members = [str(Path(project).parent) for project in projects if project.split("/")[0] not in LEFT_OUT]
        editable = [word for member in members for word in ("--editable", f"./{member}")]
        _run(str(UV), "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", *python, *editable, cwd=folder)
        return cls(folder)

    def remove(self) -> None:
        subprocess.run(["git", "worktree", "remove", "--force", str(self.folder)], cwd=ROOT, check=False)


def _run(*command: str, cwd: Path) -> str:
    process = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)}: {process.stderr[-2000:]}")
    return process.stdout


@dataclass(frozen=True)
class Written:
    """State of the data directory when the earlier commit left it."""

    account: TurnAccount
    champion: str | None
    rollouts: list[tuple[str, str]]
    digests: list[str]
    """Digest of each trained batch, in order."""
    steps: dict[str, int]
    """Step of each version."""
    dead_letters: set[str]
    """Ids of the dead letters."""

    @property
    def last_step(self) -> int:
        return max(self.steps.values())


class Scenario:
    """One data directory, its settings, and the stacks of both commits on it."""

    def __init__(self, folder: Path, old: Checkout, settings: dict[str, object]) -> None:
        self.data = folder / "data"
        self._settings = settings
        self._old = old
        self._agent_report = folder / "agent.json"
        self._invalid = 0
        """Number of invalid records that were published."""

    def write(self) -> Written:
        """Let the earlier commit serve, train, promote two versions, begin a rollout and refuse records."""
        asyncio.run(self._work(self._stack(old=True), lambda up: circle.promotions(up) > PROMOTIONS))
        return asyncio.run(self._work(self._stack(old=True, **CANARY), lambda up: bool(_rollouts(up))))

    def open(self, written: Written) -> list[Line]:
        """Open the directory with this commit, compare its state, replay its batches and train on."""
        up = self._stack(old=False, **CANARY)
        up.start()
        try:
            return [*self._compare(up, written), self._replay(written), *asyncio.run(self._train_on(up, written))]
        finally:
            up.stop()

    def _stack(self, *, old: bool, **more: object) -> HeadraceUp:
        """Return the stack of the earlier commit or of this one."""
        examples = (self._old.folder if old else ROOT) / "examples"
        settings = self._settings | more
        program = self._old.headrace if old else HEADRACE
        config = examples / "email_agent" / "headrace.toml"
        return HeadraceUp(self.data, config, settings, {"PYTHONPATH": str(examples)}, program, START_S)

    async def _work(self, up: HeadraceUp, until: Callable[[HeadraceUp], bool]) -> Written:
        """Run the agent until `until`, publish records that are refused, and return the state at the end."""
        up.start()
        try:
            await circle.work(up, lambda: until(up), 0, self._agent_report)
            bus = up.state.bus
            await _publish_invalid_feedback(bus)
            self._invalid += INVALID
            await _everything_decided(bus, self._invalid)
            digests = [batch.digest for metrics in await _read(bus, TrainingMetrics) for batch in metrics.batches]
            steps = {checkpoint.version: checkpoint.step for checkpoint in await _read(bus, Checkpoint)}
            dead_letters = {letter.event_id for letter in await _read(bus, DeadLetter)}
            return Written(await read_turn_account(bus), _champion(up), _rollouts(up), digests, steps, dead_letters)
        finally:
            assert up.stop() == 0, up.log[-3000:]

    def _compare(self, up: HeadraceUp, written: Written) -> list[Line]:
        account = asyncio.run(read_turn_account(up.state.bus))
        messages: Any = [{"role": "user", "content": "Who sent the invoice?"}]
        with openai.OpenAI(base_url=up.base_url, api_key="none") as client:
            answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
        letters = json.loads(self._headrace("dead-letters", "list", "--json", "--limit", "1000"))["letters"]
        listed = written.dead_letters & {letter["id"] for letter in letters}
        return [
            equals("champion", _champion(up), written.champion),
            equals("a call is answered by a version of before", answer.model in written.steps, True),
            equals("captured, trained, waiting and dropped turns", _counts(account), _counts(written.account)),
            equals("rollouts", _rollouts(up), written.rollouts),
            equals("dead letters listed", len(listed), len(written.dead_letters)),
            equals("records that cannot be read", asyncio.run(_count_unreadable(up.state.bus)), self._invalid),
        ]

    def _replay(self, written: Written) -> Line:
        plan = json.loads(self._headrace("replay", "plan", "--json"))
        digests = [batch["digest"] for batch in plan["training"]["batches"]]
        expected = written.digests
        same = sum(left == right for left, right in zip(digests, expected, strict=False))
        return equals(
            "replayed batches with the digest of before",
            f"{same} of {len(expected)}",
            f"{len(expected)} of {len(expected)}",
        )

    async def _train_on(self, up: HeadraceUp, written: Written) -> list[Line]:
        """Let the agent work until `STEPS` further steps were trained."""
        await circle.work(up, lambda: _last_step(up) >= written.last_step + STEPS, 0, self._agent_report)
        bus = up.state.bus
        await _everything_decided(bus, self._invalid)
        account = await read_turn_account(bus)
        verdicts = [v for metrics in await _read(bus, TrainingMetrics) for v in metrics.verdicts if not v.dropped]
        revisions = [(verdict.experience_id, verdict.revision) for verdict in verdicts]
        failed = json.loads(self._agent_report.read_text(encoding="utf-8"))["failed_requests"]
        return [
            at_least("steps trained after the upgrade", _last_step(up) - written.last_step, STEPS),
            equals("experiences trained twice", len(revisions) - len(set(revisions)), 0),
            equals("problems of the account", account.problems_total, 0),
            equals("turns that `headrace status` accounts for", _accounted(up.status()), account.captured),
            at_least("turns captured after the upgrade", account.captured - written.account.captured, 1),
            equals("failed requests of the agent", failed, 0),
        ]

    def _headrace(self, *arguments: str) -> str:
        """Return the output of a command of this commit, with the settings of the stack."""
        chosen = {
            f"HEADRACE_{name.upper().replace('.', '__')}": as_setting(value) for name, value in self._settings.items()
        }
        config = ROOT / "examples" / "email_agent" / "headrace.toml"
        chosen |= {"HEADRACE_DATA_DIR": str(self.data), "HEADRACE_CONFIG": str(config)}
        environ = {**os.environ, **chosen, "PYTHONPATH": str(ROOT / "examples")}
        process = subprocess.run([HEADRACE, *arguments], env=environ, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr[-3000:]
        return process.stdout


async def _publish_invalid_feedback(bus: str) -> None:
    """Publish records that the collector refuses."""
    producer = AIOKafkaProducer(bootstrap_servers=bus)
    await producer.start()
    try:
        for number in range(INVALID):
            await producer.send_and_wait(Feedback.topic, b'{"value": "no feedback"}', key=str(number).encode())
    finally:
        await producer.stop()


async def _everything_decided(bus: str, invalid: int) -> None:
    """Wait until every turn is trained or dropped and the collector has dead-lettered `invalid` records."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        account = await read_turn_account(bus)
        letters = [letter for letter in await _read(bus, DeadLetter) if letter.service == "collector"]
        if not account.waiting and len(letters) >= invalid:
            return
        assert time.monotonic() < deadline_s, f"after {WAIT_S} s: {account}, {len(letters)} dead letters"
        await asyncio.sleep(1)


async def _read(bus: str, kind: type[E]) -> list[E]:
    """Return the events of a topic, each once."""
    events: dict[str, E] = {}
    async with connected(bus) as topics:
        async for entry in topics.read(Range(kind.topic)):
            if isinstance(entry.event, kind):
                events[entry.event.event_id] = entry.event
    return list(events.values())


async def _count_unreadable(bus: str) -> int:
    async with connected(bus) as topics:
        return sum([entry.event is None for kind in circle.FACTS async for entry in topics.read(Range(kind.topic))])


def _counts(account: TurnAccount) -> dict[str, object]:
    return {name: getattr(account, name) for name in ("captured", "trained", "waiting", "dropped")}


def _accounted(status: dict[str, Any]) -> int:
    """Return the number of trained, waiting and dropped turns in the reply of `headrace status`."""
    account = status["account"]
    return int(account["trained"] + sum(account["waiting"].values()) + sum(account["dropped"].values()))


def _champion(up: HeadraceUp) -> str | None:
    with ModelRegistry(up.state.services["registry"].url) as registry:
        return registry.model(MODEL).champion


def _rollouts(up: HeadraceUp) -> list[tuple[str, str]]:
    """Return rollout and version of all rollouts."""
    with ModelRegistry(up.state.services["registry"].url) as registry:
        return [(rollout.id, rollout.version) for rollout in Rollouts(registry).list()]


def _last_step(up: HeadraceUp) -> int:
    return max(version.step for version in circle.versions(up))


def _play(run: Run) -> None:
    old = Checkout.make(run.options.commit, run.folder / "old")
    try:
        base = circle.base_model()
        with FakeLLM(verdict(outcome=4, grounding=4, conduct=5, clarity=5)) as judge, contextlib.ExitStack() as servers:
            for name in run.options.only:
                if name == "postgres" and (reason := missing_postgres()):
                    run.skip(name, reason)
                    continue
                folder = run.folder / name
                folder.mkdir()
                database = {} if name == "sqlite" else {"database.url": _start_postgres(folder, servers)}
                scenario = Scenario(folder, old, circle.settings(base, judge) | database)
                written = scenario.write()
                run.add_all(replace(line, name=f"{name}: {line.name}") for line in scenario.open(written))
    finally:
        old.remove()


def _start_postgres(folder: Path, servers: contextlib.ExitStack) -> str:
    """Start a server that `servers` stops, and return the address of its database."""
    node = PostgresNode(folder / "postgres", durable=False)
    node.folder.mkdir()
    servers.callback(node.stop)
    node.start()
    return node.url()


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=DATABASES, default=DATABASES, help="databases (default: both)")
    parser.add_argument("--commit", default=COMMIT, help="the earlier commit (default: %(default)s)")


PROGRAM = Program("Open a data directory of an earlier commit.", _play, _add_arguments)
