"""A table whose bus is away."""

from __future__ import annotations

import asyncio
import gc
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.kafka.consumer import TopicTable
from headrace_runtime.kafka.wire import Record
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import EVENTS, Event, Routing
from tests.support.ports import free_port


async def test_waiting_for_the_bus_leaves_no_reader_open(tmp_path: Path) -> None:
    async def refuse(_record: Record, _error: InvalidEvent) -> None:
        raise AssertionError("there is nothing to refuse")

    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    bus = BusSettings(address=f"127.0.0.1:{free_port()}")
    table = TopicTable(Routing, bus, "test", BlobStore(tmp_path.as_uri()), refuse)
    waiting = asyncio.create_task(table.run())
    await asyncio.sleep(0.7)  # one attempt and the next
    waiting.cancel()
    await asyncio.wait([waiting])
    gc.collect()
    assert not table.loaded.is_set()
    assert complaints == []


@pytest.mark.parametrize("error", [ValueError, OverflowError, RecursionError, KeyError, UnicodeError])
@pytest.mark.parametrize("topic", ["routing", "replicas", "checkpoints"])
async def test_a_row_that_breaks_its_reader_is_refused_and_the_one_before_stays(
    tmp_path: Path, topic: str, error: type[Exception]
) -> None:
    """A bad record is skipped at every stage: in decoding, in acceptance, in the callback."""
    kind = EVENTS[topic]
    value = next(iter(sorted((files("headrace_schemas") / "examples" / topic).iterdir(), key=str))).read_bytes()
    refused: list[tuple[int, str]] = []

    async def refuse(record: Record, why: InvalidEvent) -> None:
        refused.append((record.offset, why.reason))

    poisoned: set[str] = set()

    def changed(_key: str, _event: Event | None) -> None:
        if "changed" in poisoned:
            raise error("poison \x00 \ud83d")

    def accepts(_event: Event) -> bool:
        if "accepts" in poisoned:
            raise error("poison")
        return True

    bus = BusSettings(address="127.0.0.1:1")
    table: TopicTable[Event] = TopicTable(kind, bus, "test", BlobStore(tmp_path.as_uri()), refuse, changed, accepts)
    await table._apply(Record(topic, 0, 0, b"a", value))
    before = dict(table.rows)
    assert list(before) == ["a"]
    for offset, stage in enumerate(["changed", "accepts"], 1):
        poisoned.add(stage)
        await table._apply(Record(topic, 0, offset, b"a", value))
        await table._apply(Record(topic, 0, 10 + offset, b"new", value))
        poisoned.clear()
    await table._apply(Record(topic, 0, 5, b"a", b"[" * 100_000))
    assert table.rows == before
    assert [offset for offset, _ in refused] == [1, 11, 2, 12, 5]
    await table._apply(Record(topic, 0, 6, b"b", value))
    assert list(table.rows) == ["a", "b"]
