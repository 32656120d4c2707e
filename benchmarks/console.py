"""Read model and pages of the console: `python -m benchmarks.console`. Writes `reports/bench-console.json`.

First the follower applies the records of `--intake` sessions: three turns, a trajectory, an experience, an outcome and
three rewards each. It must apply 1,000 turns per second, may hold the event loop for 50 ms, and may store 300 MB per
million turns in SQLite and 600 MB in PostgreSQL. These sizes include indexes, free pages and dead rows: they are read
after the last batch, and nothing was compacted before except by autovacuum. Then all of these sessions expire. At last
each list is requested from a database of `--sessions` sessions. 95 of 100 requests must be answered within 50 ms. The
exit status is 1 otherwise. With a million sessions the benchmark takes about half an hour; `--sessions` shortens it.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import hashlib
import json
import os
import platform
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import insert, text

from benchmarks._run_processes import Summary, chosen_databases
from headrace_cli.terminal import ProgressDisplay
from headrace_console.app import Console
from headrace_console.read_model import follower, retention, tables
from headrace_console.read_model.batch import trajectory_name
from headrace_console.read_model.packing import pack_id, pack_numbers, split_turn
from headrace_console.read_model.rows import Names
from headrace_console.settings import ConsoleSettings, UserSettings
from headrace_runtime.clock import SystemClock, epoch_ms
from headrace_runtime.kafka.wire import Record, encode
from headrace_runtime.process.event_loop import LoopWatch
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.database import Database, migrate
from headrace_schemas import Event, Experience, Message, Reward, Usage
from headrace_schemas.values.ids import response_id, session_key
from tests.support import servers
from tests.support import turns as events
from tests.unit.console.support import Stand

TURNS_PER_S_MIN = 1_000.0
BLOCK_MS_MAX = 50.0
PAGE_MS_MAX = 50.0
BYTES_PER_TURN_MAX = {"sqlite": 300, "postgres": 600}
_TURNS = 3
_SESSIONS_PER_STEP = 20
_REQUESTS = 60
_INSERTED_AT_ONCE = 2_000
_BEGAN = datetime(2026, 11, 1, tzinfo=UTC)
_SOURCES = ("concise", "correct", "polite")
_TENTHS = 11


def session_events(number: int) -> Iterator[Event]:
    """Return the events of one session in the order in which services publish them."""
    key = session_key("default", f"session-{number}")
    more: dict[str, Any] = {"session_key": key, "session_id": f"session-{number}"}
    at = _BEGAN + timedelta(seconds=number)
    message = Message(role="user", content="Where is invoice 4711? " + "It was sent in March. " * 30)
    ids = [response_id(key) for _ in range(_TURNS)]
    for name in ids:
        prompt = {"messages": (message,), "prompt_token_ids": tuple(range(200)), "time": at, "started_at": at}
        yield events.turn(name, **more, **prompt, usage=Usage(prompt_tokens=200, completion_tokens=1))
    run = f"run-{number}"
    yield events.trajectory(run, tuple(ids), **more, time=at, started_at=at)
    for source in _SOURCES:
        yield Reward(time=at, trajectory_id=run, session_key=key, source=source, value=number % _TENTHS / 10)
    yield events.experience(Experience.id_of(run, 0), *ids, of=run).model_copy(update={"session_key": key, "time": at})
    if number % _SESSIONS_PER_STEP == 0:
        names = [Experience.id_of(f"run-{number - at}", 0) for at in range(min(_SESSIONS_PER_STEP, number + 1))]
        outcomes = [events.verdict(name, dropped="stale" if at % 3 else None) for at, name in enumerate(names)]
        yield events.report(*outcomes, save=number, at_s=number)


async def records_of(sessions: range, blobs: BlobStore, offsets: dict[str, int]) -> list[Record]:
    records = []
    for number in sessions:
        for event in session_events(number):
            outgoing = await encode(event, "headrace/bench", blobs)
            headers = tuple(outgoing.headers)
            offset = offsets[event.topic] = offsets.get(event.topic, -1) + 1
            records.append(Record(event.topic, 0, offset, outgoing.key, outgoing.value, headers))
    return records


async def intake(common: Common, sessions: int) -> dict[str, object]:
    """Let the follower apply the events of `sessions` sessions, and delete all of them."""
    database, blobs, clock = Database.open("console", common), BlobStore.open(common), SystemClock()
    await migrate(database, "headrace_console")
    reader = follower.TopicFollower(
        common.bus, database, blobs, clock, lambda _topics: None, titles=True, retention_days=30
    )
    watch, offsets = LoopWatch(), dict[str, int]()
    watching, batches, busy_s = asyncio.create_task(watch.run()), list[float](), 0.0
    size, blocks = follower.batch_max(database), list[float]()
    with ProgressDisplay("bench-console, intake", sessions, unit="sessions") as progress:
        for first in range(0, sessions, 200):
            records = await records_of(range(first, min(first + 200, sessions)), blobs, offsets)
            gc.collect()
            gc.freeze()  # so that no collection of the records of the benchmark is measured
            for at in range(0, len(records), size):
                await asyncio.sleep(0)
                watch.take()
                began, cpu_s = time.perf_counter(), time.process_time()
                await reader.process(records[at : at + size])
                batches.append(time.perf_counter() - began)
                busy_s += time.process_time() - cpu_s
                await asyncio.sleep(0)
                blocks.append(watch.take())
            progress.update(first)
    stored = await stored_bytes(database)
    deletions = list[float]()
    day, names, more = epoch_ms(clock.now()) // tables.DAY_MS + 31, Names(), True
    while more:
        await asyncio.sleep(0)
        watch.take()
        began = time.perf_counter()
        async with database.transaction() as tx:
            more = await retention.delete_expired(tx, names, day=day, retention_days=30)
        deletions.append(time.perf_counter() - began)
        await asyncio.sleep(0)
        blocks.append(watch.take())
    watching.cancel()
    await database.close()
    turns = _TURNS * sessions
    return {
        "turns_per_s": round(turns / sum(batches), 1),
        "turns_per_cpu_s": round(turns / busy_s, 1),
        "block_ms": _quantiles(blocks),
        "batch_ms": _quantiles(batches),
        "bytes_per_turn": round(sum(stored.values()) / turns),
        "bytes_per_turn_by_object": {name: round(size / turns, 1) for name, size in stored.items()},
        "deleted_turns_per_s": round(turns / sum(deletions), 1),
        "deletion_ms": _quantiles(deletions),
    }


def _quantiles(durations_s: list[float]) -> dict[str, float]:
    summary = Summary.of([1000 * duration for duration in durations_s])
    return {**summary.latency(), "max": round(summary.quantile(1.0), 2)}


async def stored_bytes(database: Database) -> dict[str, int]:
    """Return the size of each table and each index, the largest first."""
    query = (
        "SELECT name, sum(pgsize) FROM dbstat GROUP BY name"
        if database.sqlite
        else "SELECT relname, pg_table_size(oid) FROM pg_class"
        " WHERE relnamespace = 'console'::regnamespace AND relkind IN ('r', 'i')"
    )
    async with database.transaction() as tx:
        sizes = {name: int(size) for name, size in await tx.execute(text(query))}
    return dict(sorted(sizes.items(), key=lambda item: -item[1]))


async def fill(database: Database, sessions: int) -> list[str]:
    """Store rows of `sessions` sessions, and return the keys of some of them."""
    chance, names = random.Random(1), Names()
    texts = [f"m@{hashlib.sha256(bytes([number])).hexdigest()[:12]}" for number in range(40)]
    numbers = {name: names.number(name) for name in ("default", "m", "trained/", "stop", "scored", *_SOURCES, *texts)}
    keys = []
    async with database.transaction() as tx:
        await names.store(tx)
    with ProgressDisplay("bench-console, filling", sessions, unit="sessions") as progress:
        for first in range(0, sessions, _INSERTED_AT_ONCE):
            portion = range(first, min(first + _INSERTED_AT_ONCE, sessions))
            rows: dict[str, list[dict[str, Any]]] = {name: [] for name in ("sessions", "turns", "trajectories")}
            rows |= {"experiences": [], "rewards": []}
            for number in portion:
                key = session_key("default", f"session-{number}")
                keys.append(key)
                _add_rows(rows, number + 1, key, numbers, texts, chance)
            async with database.transaction() as tx:
                for name, table_rows in rows.items():
                    await tx.execute(insert(tables.metadata.tables[name]), table_rows)
            progress.update(first)
    async with database.transaction() as tx:
        await tx.execute(insert(tables.hours), _hours(sessions, numbers))
    return chance.sample(keys, min(len(keys), _REQUESTS))


def _add_rows(
    rows: Mapping[str, list[dict[str, Any]]],
    number: int,
    key: str,
    numbers: Mapping[str, int],
    versions: list[str],
    chance: random.Random,
) -> None:
    began_ms = epoch_ms(_BEGAN) + 1000 * number
    version, model, tenant = numbers[chance.choice(versions)], numbers["m"], numbers["default"]
    turns = [_TURNS * number + at for at in range(_TURNS)]
    position = {"partition": 0, "log_offset": number}
    rows["sessions"].append(
        {
            "id": number, "tenant": tenant, "session_key": key, "session_id": f"session-{number}", "model": model,
            "version": version, "began_ms": began_ms, "last_ms": began_ms, "turns": _TURNS, "tokens": 90,
            "trained": _TURNS, "waiting": 0, "dropped": 0, "status": chance.choice((0, 0, 0, 1, 2)),
            "reward": chance.random(), "thumb": chance.choice((None,) * 8 + (1, -1)), "flags": 0,
            "task_id": None, "title": "Where is invoice 4711? " * 3, "read_day": 20_000,
        }
    )  # fmt: skip
    for row_id in turns:
        rows["turns"].append(
            {
                "id": row_id, "name": split_turn(pack_id(response_id(key)))[1], "session": number, "model": model,
                "version": version, "at_ms": began_ms, **position, "prompt_tokens": 200, "sampled_tokens": 30,
                "eval": False, "refused": False, "untrained": None, "no_logprobs": None,
                "status": numbers["trained/"], "finish": numbers["stop"], "latency_ms": 900, "arm": None,
                "choices": 1,
                "trajectories": pack_numbers([number]), "experiences": pack_numbers([number]),
            }
        )  # fmt: skip
    packed = pack_numbers(turns)
    rows["trajectories"].append(
        {
            "id": number, "name": trajectory_name(f"run-{number}"), "session": number, "model": model,
            **position, "eval": False, "ingested": False, "refused": False, "untrained": None, "turns": packed,
            "left_out": None, "no_logprobs": None,
        }
    )  # fmt: skip
    rows["experiences"].append(
        {
            "id": number, "name": pack_id(Experience.id_of(f"run-{number}", 0)), "session": number, "revision": 0,
            **position, "reward": 0.5, "no_reward": None, "weight": 1.0, "refused": False,
            "turns": packed, "history": None, "read_day": 20_000,
        }
    )  # fmt: skip
    for at, source in enumerate(_SOURCES):
        rows["rewards"].append(
            {
                "trajectory": number, "turn": 0, "choice": -1, "source": numbers[source], "revision": 0,
                "outcome": numbers["scored"], "value": (number + at * (number % 7)) % _TENTHS / 10,
                "at_ms": began_ms, **position,
            }
        )  # fmt: skip


def _hours(sessions: int, numbers: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return rows of `hours` with about as many rewards as there are, in each tenth of the values."""
    first, last = ((epoch_ms(_BEGAN) + 1000 * number) // tables.HOUR_MS for number in (0, sessions))
    shared = {"tenant": numbers["default"], "outcome": numbers["scored"]}
    rewards = tables.HOUR_MS // 1000 // _TENTHS
    return [
        {**shared, "source": numbers[source], "hour": hour, "bucket": tenth, "rewards": rewards, "total": tenth * 32.7}
        for source in _SOURCES
        for hour in range(first, last + 1)
        for tenth in range(_TENTHS)
    ]


async def pages(common: Common, sessions: int) -> dict[str, dict[str, float]]:
    """Return the time of each page of a console with `sessions` sessions, without a bus."""
    stand = Stand(common.data_dir)
    user = UserSettings(name="viewer", sha256=hashlib.sha256(b"viewer").hexdigest(), role="viewer")
    stand.console = Console(common, ConsoleSettings(users=(user,)), stand.clock)
    database = stand.console.database
    await migrate(database, "headrace_console")
    keys = await fill(database, sessions)
    async with database.transaction() as tx:
        await tx.exec_driver_sql("ANALYZE")
    client = await stand.signed_in()
    middle = epoch_ms(_BEGAN) + 500 * sessions
    version = f"m@{hashlib.sha256(bytes([7])).hexdigest()[:12]}"
    addresses = {
        "newest": "/sessions",
        "deep page": f"/sessions?after={middle}.{sessions // 2}",
        "version": f"/sessions?version={version}",
        "thumb": "/sessions?thumb=down",
        "status": "/sessions?status=dropped",
        "search": "/sessions?reward_max=0.001",
        "rewards": "/rewards?days=400",
    }
    durations: dict[str, list[float]] = {name: [] for name in (*addresses, "session")}
    for key in keys:
        for name, address in (*addresses.items(), ("session", f"/s/{key}")):
            began = time.perf_counter()
            reply = await client.get(address)
            durations[name].append(time.perf_counter() - began)
            if reply.status_code != 200:
                raise RuntimeError(f"{address}: status {reply.status_code}: {reply.text[:500]}")
    await client.aclose()
    await stand.console.close()
    return {name: _quantiles(values) for name, values in durations.items()}


def measure_database(name: str, sessions: int, arriving: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
        root = Path(folder)
        node = servers.PostgresNode(root) if name == "postgres" else None
        if node is not None:
            node.start()
        try:
            result: dict[str, Any] = {}
            for part, measure, size in (("intake", intake, arriving), ("pages", pages, sessions)):
                url = node.empty_url() if node is not None else "sqlite"
                common = Common.model_validate({"data_dir": root / part, "database": {"url": url}})
                (root / part).mkdir()
                if size:
                    result[part] = asyncio.run(measure(common, size))
            return result
        finally:
            if node is not None:
                node.stop()


def shortfalls(databases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return the limits that were missed, as sentences."""
    problems = []
    for name, result in databases.items():
        if arriving := result.get("intake"):
            if arriving["turns_per_s"] < TURNS_PER_S_MIN:
                problems.append(f"{name}: {arriving['turns_per_s']} turns/s; must be {TURNS_PER_S_MIN:g}")
            if arriving["block_ms"]["max"] > BLOCK_MS_MAX:
                problems.append(f"{name}: a block of {arriving['block_ms']['max']} ms; at most {BLOCK_MS_MAX:g}")
            if arriving["bytes_per_turn"] > BYTES_PER_TURN_MAX[name]:
                problems.append(f"{name}: {arriving['bytes_per_turn']} bytes/turn; at most {BYTES_PER_TURN_MAX[name]}")
        for page, durations in result.get("pages", {}).items():
            if durations["p95"] > PAGE_MS_MAX and page != "session":
                problems.append(f"{name}: p95 of {page} {durations['p95']} ms; must be at most {PAGE_MS_MAX:g}")
    return problems


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1_000_000, help="stored sessions; 0 measures no page")
    parser.add_argument("--intake", type=int, default=10_000, help="sessions that the follower applies")
    parser.add_argument("--database", choices=["sqlite", "postgres", "both"], default="both")
    parser.add_argument("--report", type=Path, default=Path("reports/bench-console.json"))
    arguments = parser.parse_args()
    machine = {"cores": os.cpu_count(), "processor": platform.processor() or platform.machine()}
    report: dict[str, Any] = {"machine": machine, "sessions": arguments.sessions, "databases": {}}
    for name in chosen_databases(arguments.database, report):
        report["databases"][name] = result = measure_database(name, arguments.sessions, arguments.intake)
        for part, measures in result.items():
            for measure, value in measures.items():
                print(f"{name} {part} {measure}: {value}", flush=True)
    report["shortfalls"] = shortfalls(report["databases"])
    arguments.report.parent.mkdir(parents=True, exist_ok=True)
    arguments.report.write_text(json.dumps(report, indent=2) + "\n")
    for line in report["shortfalls"]:
        print(f"limit missed: {line}")
    return 1 if report["shortfalls"] else 0


if __name__ == "__main__":
    sys.exit(main())
