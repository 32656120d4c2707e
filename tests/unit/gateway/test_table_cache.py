"""What a gateway knows when it starts while the bus is away."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

from headrace_gateway.table_cache import TableCache
from headrace_schemas import Routing
from tests.support.gateway import routing, until

V1, V2, OTHER = "tiny@" + "1" * 16, "tiny@" + "2" * 16, "other@" + "3" * 16


@dataclass
class Topic:
    """A table whose bus comes when the test says so, and what the gateway was told."""

    rows: dict[str, Routing] = field(default_factory=dict)
    loaded: asyncio.Event = field(default_factory=asyncio.Event)
    told: list[tuple[str, Routing | None]] = field(default_factory=list)

    def comes(self, *rows: Routing) -> None:
        self.rows = {row.key: row for row in rows}
        self.loaded.set()


@contextlib.asynccontextmanager
async def kept(path: Path, topic: Topic, wait_s: float = 0.02) -> AsyncIterator[TableCache[Routing]]:
    made = TableCache(Routing, path, topic, lambda key, row: topic.told.append((key, row)), wait_s)
    running = asyncio.create_task(made.run(every_s=0.01))
    try:
        yield made
    finally:
        running.cancel()
        await asyncio.wait([running])


def says(path: Path, text: str) -> bool:
    return path.exists() and text in path.read_text(encoding="utf-8")


async def known_from_before(path: Path, *rows: Routing) -> None:
    topic = Topic()
    topic.comes(*rows)
    async with kept(path, topic):
        await until(lambda: says(path, rows[-1].key))
    assert topic.told == [], "the table itself tells what the topic has"


async def test_a_late_bus_is_stood_in_for_and_what_it_no_longer_has_is_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "known" / "routing"
    before = routing(V1), routing(OTHER)
    await known_from_before(path, *before)
    topic = Topic()
    async with kept(path, topic) as made:
        await until(lambda: made.used)
        assert topic.told == [(row.key, row) for row in before]
        topic.comes(routing(V2))
        await until(lambda: says(path, V2))
    assert topic.told[2:] == [("other", None)]
    assert OTHER not in path.read_text(encoding="utf-8")


async def test_a_bus_in_time_is_all_that_counts(tmp_path: Path) -> None:
    path = tmp_path / "routing"
    await known_from_before(path, routing(V1))
    topic = Topic()
    topic.comes(routing(V2))
    async with kept(path, topic, wait_s=10) as made:
        await until(lambda: says(path, V2))
    assert topic.told == []
    assert not made.used


async def test_a_damaged_line_costs_its_row(tmp_path: Path) -> None:
    path = tmp_path / "routing"
    await known_from_before(path, routing(V1), routing(OTHER))
    first, second = path.read_bytes().splitlines()
    path.write_bytes(first[: len(first) // 2] + b"\n\xff" + second[1:] + b"\n" + second)
    topic = Topic()
    async with kept(path, topic):
        await until(lambda: topic.told)
    assert [key for key, _ in topic.told] == ["other"]


async def test_no_file_is_nothing_known(tmp_path: Path) -> None:
    topic = Topic()
    async with kept(tmp_path / "none", topic) as made:
        await asyncio.sleep(0.1)
        assert topic.told == []
        assert not made.used
        topic.comes(routing(V1))
        await until(lambda: says(tmp_path / "none", V1))
