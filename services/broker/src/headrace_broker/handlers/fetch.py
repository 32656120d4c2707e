"""Fetch: read what is there, or wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from headrace_broker import reads
from headrace_broker.broker import Broker, Call
from headrace_broker.catalog import View
from headrace_broker.errors import Code, Rejected
from headrace_broker.protocol.fetch import (
    READ_COMMITTED,
    FetchedPartition,
    FetchedTopic,
    FetchPartition,
    FetchRequest,
    FetchResponse,
)
from headrace_broker.reads import Got, Want


class _Asked(NamedTuple):
    """One partition of the request, and where its log was when we looked."""

    request: FetchPartition
    view: View | None
    code: Code
    limit: int
    """Offset before which records may be given out."""
    start: int
    end: int
    stable: int

    @property
    def available(self) -> bool:
        return self.code is Code.NONE and self.request.fetch_offset < self.limit


async def fetch(broker: Broker, call: Call, request: FetchRequest) -> FetchResponse:
    """Answer at once with an error or `min_bytes`, else when they are there or the wait is over.

    Kafka's fetch sessions are not used: session id 0 tells clients to send the whole request every time.
    """
    wait_s = min(request.max_wait_ms / 1000, broker.settings.fetch_wait_s)
    deadline = asyncio.get_running_loop().time() + wait_s
    while True:
        moved = asyncio.Event()
        views = {view for topic in request.topics for p in topic.partitions if (view := _view(broker, topic.name, p))}
        for view in views:
            view.readers.add(moved)
        try:
            asked, got, size = await _read(broker, call, request)
            failed = any(item.code is not Code.NONE for items in asked.values() for item in items)
            if failed or size >= request.min_bytes or not await _moves(moved, deadline):
                broker.stats.fetched_bytes += size
                return _response(asked, got)
        finally:
            for view in views:
                view.readers.discard(moved)
        broker.fetch_memory.give(call.response_bytes)
        call.response_bytes = 0


async def _moves(moved: asyncio.Event, deadline: float) -> bool:
    """Wait until a partition has moved; False when the deadline came first."""
    try:
        async with asyncio.timeout_at(deadline):
            await moved.wait()
    except TimeoutError:
        return False
    return True


async def _read(
    broker: Broker, call: Call, request: FetchRequest
) -> tuple[dict[str, list[_Asked]], dict[View, Got], int]:
    committed = request.isolation_level == READ_COMMITTED
    asked = {
        t.name: [_look(_view(broker, t.name, p), p, committed=committed) for p in t.partitions] for t in request.topics
    }
    available = [item for items in asked.values() for item in items if item.available and item.view]
    if not available:
        return asked, {}, 0
    bytes_max = max(min(request.max_bytes, broker.settings.fetch_bytes_max), 1)
    # A lone batch may be larger than asked for; the memory is corrected to what was read.
    call.response_bytes = await broker.fetch_memory.take(bytes_max)
    wants = [
        Want(item.view.id, item.request.fetch_offset, item.limit, item.request.max_bytes, committed)
        for item in available
        if item.view
    ]
    try:
        got = await broker.readers.run(reads.batches, wants, bytes_max)
    except Rejected as error:
        return _failed(asked, error.code), {}, 0
    size = sum(len(item.records) for item in got)
    spare = max(call.response_bytes - size, 0)
    broker.fetch_memory.give(spare)
    call.response_bytes -= spare
    return asked, {item.view: answer for item, answer in zip(available, got, strict=True) if item.view}, size


def _view(broker: Broker, topic: str, partition: FetchPartition) -> View | None:
    return broker.catalog.view(topic, partition.partition)


def _look(view: View | None, partition: FetchPartition, *, committed: bool) -> _Asked:
    if view is None:
        return _Asked(partition, None, Code.UNKNOWN_TOPIC_OR_PARTITION, -1, -1, -1, -1)
    inside = view.start <= partition.fetch_offset <= view.end
    code = Code.NONE if inside else Code.OFFSET_OUT_OF_RANGE
    limit = view.stable if committed else view.end
    return _Asked(partition, view, code, limit, view.start, view.end, view.stable)


def _failed(asked: dict[str, list[_Asked]], code: Code) -> dict[str, list[_Asked]]:
    return {
        name: [item._replace(code=code) if item.available else item for item in items] for name, items in asked.items()
    }


def _response(asked: dict[str, list[_Asked]], got: dict[View, Got]) -> FetchResponse:
    topics = tuple(FetchedTopic(name, tuple(_partitions(items, got))) for name, items in asked.items())
    return FetchResponse(0, Code.NONE, 0, topics)


def _partitions(items: Iterable[_Asked], got: dict[View, Got]) -> Iterable[FetchedPartition]:
    nothing = Got(b"", None)
    for item in items:
        found = got.get(item.view, nothing) if item.view else nothing
        yield FetchedPartition(
            item.request.partition, item.code, item.end, item.stable, item.start, found.aborted, -1, found.records
        )
