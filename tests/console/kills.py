"""Kills of the console and of readers of its topics: its counts still equal those of `headrace status`.

`python -m tests.console.kills < task.json` kills a reader of the topics within its batches until all is read. It prints
the number of kills, and the counts after each complete reading. The task has `bus`, `data_dir`, `kills` and `seed`.
Each reader is a fork, so that its start takes no time.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from headrace_console.read_model import follower, queries
from headrace_console.settings import Scope
from headrace_operations.from_topics import read_turn_account
from headrace_operations.supervisor.process import Limits
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import BusSettings, Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database, migrate
from tests.console.stack import BATCHES, ConsoleStack, console_stack
from tests.integration.console.test_follower import follow
from tests.support.processes import wait_until
from tests.support.servers import BrokerProcess
from tests.system.program import Line, at_least, equals, no_problems
from tests.unit.console.test_counts import random_history

READER_KILLS = 200
CONSOLE_KILLS = 50
_SESSIONS = 150
_CALLS_MIN = 20
_RESTARTED_S = 60.0
_SETTLED_S = 60.0
_REASONS = r"(?: \(([^)]*)\))?"
_SENTENCE = re.compile(
    r"([0-9,]+) turns? captured = ([0-9,]+) trained \+ "
    rf"([0-9,]+) waiting{_REASONS} \+ ([0-9,]+) dropped{_REASONS}"
)
AccountCounts = tuple[int, int, dict[str, int], dict[str, int]]
"""Counts of turns: captured, trained, waiting by reason, and dropped by reason."""


def lines(folder: Path, base: Path) -> Iterator[Line]:
    """Yield the result lines of two tests: a killed reader of the topics, and a killed console in a stack."""
    yield from _reader_lines(folder / "reader", random.Random(folder.as_posix()).randrange(2**31))
    yield from _console_lines(folder / "stack", base)


def _reader_lines(folder: Path, seed: int) -> Iterator[Line]:
    broker = BrokerProcess(folder / "broker")
    broker.start()
    try:
        account = asyncio.run(_play(broker.address, folder, seed))
        task = {"bus": broker.address, "data_dir": str(folder), "kills": READER_KILLS, "seed": seed}
        process = subprocess.run(
            [sys.executable, "-m", "tests.console.kills"],
            input=json.dumps(task), stdout=subprocess.PIPE, text=True, timeout=600, check=True,
        )  # fmt: skip
    finally:
        broker.stop()
    observed = json.loads(process.stdout)
    yield equals("kills of the reader", observed["kills"], READER_KILLS)
    counts = [(of["captured"], of["trained"], of["waiting"], of["dropped"]) for of in observed["counts"]]
    differing = [f"{reading}, the account has {account}" for reading in counts if reading != account]
    yield no_problems("complete readings whose counts differ from the account", differing)


async def _play(bus: str, folder: Path, seed: int) -> AccountCounts:
    """Publish sessions that end in random states, and return the account of their turns."""
    settings = BusSettings(address=bus)
    await topics.ensure(settings)
    producer = EventProducer(settings, "headrace/test", BlobStore((folder / "blobs").as_uri()))
    await producer.start()
    for event in random_history(random.Random(seed), _SESSIONS):
        await producer.send(event)
    await producer.stop()
    account = await read_turn_account(bus)
    return account.captured, account.trained, dict(account.waiting), dict(account.dropped)


@dataclass
class Calls:
    """Agent that plays sessions of one call each, in sequence, during the block."""

    stack: ConsoleStack
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Calls:
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _play(self) -> None:
        while not self._stop.wait(0.1):
            try:
                self.stack.call(f"task {self.answered % 2}", value=self.answered % 2)
                self.answered += 1
            except Exception as error:  # noqa: BLE001 (every failure of a call is counted)
                self.failed.append(repr(error))


def _console_lines(folder: Path, base: Path) -> Iterator[Line]:
    draw, settings = random.Random(folder.as_posix()), {**BATCHES, "trainer.base": str(base)}
    limits = Limits(first_pause_s=0.05, pause_max_s=0.05)
    with console_stack(folder, settings, limits=limits) as stack:
        stack.supervisor.wait_ready(180)
        with Calls(stack) as calls:
            for _ in range(CONSOLE_KILLS):
                time.sleep(draw.uniform(0, 1.5))
                _kill_console(stack)
        yield equals("kills of the console", stack.supervisor.state.services["console"].restarts, CONSOLE_KILLS)
        yield from _call_lines("while the console is killed", calls)
        yield _same_counts("after the kills", stack)
        for file in (stack.folder / "db").glob("console.sqlite*"):
            file.unlink()
        _kill_console(stack)
        yield _same_counts("after a new start without its database", stack)
    with console_stack(folder, settings, without=("console",)) as stack, Calls(stack) as calls:
        wait_until(lambda: calls.answered >= _CALLS_MIN or bool(calls.failed), _RESTARTED_S, "calls are answered")
    yield from _call_lines("without a console", calls)


def _kill_console(stack: ConsoleStack) -> None:
    """Kill the console with SIGKILL, and wait until its next process has started."""
    wait_until(lambda: "console" in stack.supervisor.pids, _RESTARTED_S, "the console runs")
    pid = stack.supervisor.pids["console"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: stack.supervisor.pids.get("console", pid) != pid, _RESTARTED_S, "the console is started again")


def _call_lines(when: str, calls: Calls) -> Iterator[Line]:
    yield no_problems(f"failed calls {when}", calls.failed)
    yield at_least(f"answered calls {when}", calls.answered, _CALLS_MIN)


def _same_counts(when: str, stack: ConsoleStack) -> Line:
    """Compare the counts on the page Loop with `headrace status --json` once both have read everything."""
    stack.supervisor.wait_ready(_RESTARTED_S)
    deadline_s = time.monotonic() + _SETTLED_S
    with httpx2.Client(base_url=stack.url, timeout=30.0, trust_env=False) as http:
        assert http.get(stack.login_path()).status_code == 303
        while (shown := _shown(http)) != (account := _accounted(stack)) and time.monotonic() < deadline_s:
            time.sleep(0.5)
    figure = f"the page has {shown}, the account {account}"
    return Line(f"counts of the console {when}", figure, "equal", shown == account and account[0] > 0)


def _shown(http: httpx2.Client) -> AccountCounts | None:
    text = " ".join(re.sub(r"<[^>]*>", "", http.get("/").text).split())
    match = _SENTENCE.search(text)
    if match is None:
        return None
    captured, trained, _, waiting, _, dropped = match.groups()
    return _number(captured), _number(trained), _numbers(waiting), _numbers(dropped)


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _numbers(text: str | None) -> dict[str, int]:
    pairs = [part.rpartition(" ") for part in text.split(", ")] if text else []
    return {reason: _number(number) for reason, _, number in pairs}


def _accounted(stack: ConsoleStack) -> AccountCounts:
    headrace = Path(sys.executable).with_name("headrace")
    command = [str(headrace), "status", "--json", "--data-dir", str(stack.folder)]
    status = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120).stdout)
    account = status["account"]
    return account["captured"], account["trained"], _plain(account["waiting"]), _plain(account["dropped"])


def _plain(reasons: Mapping[str, Any]) -> dict[str, int]:
    return {reason.replace("_", " "): number for reason, number in reasons.items()}


_BATCH = 10
_BATCHES_MAX = 4
"""Maximum number of batches that a reader applies before it is killed within the next batch."""
_WITHIN_S = 0.05
"""Maximum time between the end of a batch and the kill, in seconds."""
_QUIET_S = 60.0


async def _make_tables(common: Common) -> None:
    database = Database.open("console", common)
    await migrate(database, "headrace_console")
    await database.close()


async def _read(common: Common, applied: int) -> None:
    """Read to the end of all topics, and write one byte to the descriptor `applied` after each batch."""
    database = Database.open("console", common)
    await follow(common, database, lambda: os.write(applied, b"."))
    await database.close()


async def _counts(common: Common) -> dict[str, Any]:
    database = Database.open("console", common)
    async with database.transaction() as tx:
        counts = await queries.counts(tx, Scope(None))
    await database.close()
    return asdict(counts)


def _kill_one(common: Common, draw: random.Random) -> bool:
    """Start a reader and kill it after some batches. Return False if the reader had read everything before the kill."""
    applied, writes = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(applied)
        asyncio.run(_read(common, writes))
        os._exit(0)
    os.close(writes)
    try:
        for _ in range(draw.randint(0, _BATCHES_MAX)):
            if not select.select([applied], [], [], _QUIET_S)[0]:
                raise TimeoutError(f"reader {pid} has applied no batch for {_QUIET_S:g} s")
            if not os.read(applied, 1):
                break
        time.sleep(draw.uniform(0, _WITHIN_S))
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return True
    finally:
        os.close(applied)


def main() -> None:
    task = json.load(sys.stdin)
    common = Common.model_validate({"data_dir": task["data_dir"], "bus": {"address": task["bus"]}})
    draw, follower._BATCH_MAX = random.Random(task["seed"]), _BATCH
    kills, counts = 0, list[dict[str, Any]]()
    while kills < task["kills"]:
        shutil.rmtree(Path(task["data_dir"]) / "db", ignore_errors=True)
        asyncio.run(_make_tables(common))
        while kills < task["kills"] and _kill_one(common, draw):
            kills += 1
        devnull = os.open(os.devnull, os.O_WRONLY)
        asyncio.run(_read(common, devnull))
        os.close(devnull)
        counts.append(asyncio.run(_counts(common)))
    print(json.dumps({"kills": kills, "counts": counts}))


if __name__ == "__main__":
    main()
