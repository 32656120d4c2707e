"""A table whose bus is away."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

from headrace_runtime.blobs import BlobStore
from headrace_runtime.consumer import Table
from headrace_runtime.errors import InvalidEvent
from headrace_runtime.settings import BusSettings
from headrace_runtime.wire import Record
from headrace_schemas import Routing
from tests.support.ports import free_port


async def test_waiting_for_the_bus_leaves_no_reader_open(tmp_path: Path) -> None:
    async def refuse(_record: Record, _error: InvalidEvent) -> None:
        raise AssertionError("there is nothing to refuse")

    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: complaints.append(context))
    bus = BusSettings(address=f"127.0.0.1:{free_port()}")
    table = Table(Routing, bus, "test", BlobStore(tmp_path.as_uri()), refuse)
    waiting = asyncio.create_task(table.run())
    await asyncio.sleep(0.7)  # one attempt and the next
    waiting.cancel()
    await asyncio.wait([waiting])
    gc.collect()
    assert not table.loaded.is_set()
    assert complaints == []
