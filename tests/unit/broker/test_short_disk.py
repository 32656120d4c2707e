"""A disk that becomes short: records are refused before it is full, all other requests go on, no record is lost."""

from __future__ import annotations

import math
import random
from pathlib import Path

from headrace_broker.errors import Code
from headrace_broker.protocol.offsets import (
    CommitPartition,
    CommitTopic,
    OffsetCommitRequest,
    OffsetCommitResponse,
)
from headrace_runtime.storage.disk import DiskGuard
from tests.support.full_disk import MeasuredDisk
from tests.support.record_batches import batch
from tests.unit.broker.conftest import Run

_BOUND = 1_000_000


def _guards(folder: Path) -> tuple[DiskGuard, DiskGuard]:
    return DiskGuard(folder, _BOUND), DiskGuard(folder, _BOUND, share=0.5)


async def test_records_are_refused_while_the_disk_is_short_and_taken_afterwards(run: Run, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    disk = MeasuredDisk(10 * _BOUND)
    async with run(_guards(tmp_path)) as live, live.client() as client:
        await live.create("t")
        await live.create("table", cleanup_policy="compact")
        stored = {"t": 0, "table": 0}
        with disk.mounted():
            for free in [*(rng.randrange(2 * _BOUND) for _ in range(60)), 0, 10 * _BOUND]:
                disk.free_bytes = free
                live.broker.disk._measured_s = live.broker.disk_of_tables._measured_s = -1e9  # type: ignore[union-attr]
                for topic, bound in (("t", _BOUND), ("table", _BOUND // 2)):
                    raw = batch([(b"k", bytes(rng.randrange(10_000)))])
                    code, offset = await client.produce(topic, raw)
                    has_room = free // 4096 * 4096 >= bound + 2 * len(raw)
                    assert code == (Code.NONE if has_room else Code.STORAGE_ERROR), (topic, free)
                    if has_room:
                        assert offset == stored[topic]
                        stored[topic] += 1
                assert await client.base_offsets("t") is not None
                commit = (CommitTopic("t", (CommitPartition(0, stored["t"], ""),)),)
                response = await client.ask(OffsetCommitRequest("g", -1, "", -1, commit), OffsetCommitResponse)
                assert response.topics[0].partitions[0].error_code == Code.NONE, "consumers go on"
        assert {name: live.broker.catalog.topics[name].partitions[0].end for name in stored} == stored
        assert live.broker.stats.errors[Code.STORAGE_ERROR] > 10
    async with run() as live:
        assert {name: live.broker.catalog.topics[name].partitions[0].end for name in stored} == stored


async def test_a_burst_between_two_looks_stays_above_the_bound(run: Run, tmp_path: Path) -> None:
    """Records accepted since the last check count as written, so a fast producer does not outrun the guard."""
    disk = MeasuredDisk(_BOUND + 400_000)
    async with run(_guards(tmp_path)) as live, live.client() as client:
        await live.create("t")
        guard = live.broker.disk
        assert guard is not None
        accepted = 0
        with disk.mounted():
            while (await client.produce("t", batch([(None, bytes(20_000))])))[0] == Code.NONE:
                guard._measured_s = math.inf  # from the first record on, no time passes
                accepted += 1
                assert accepted < 100
                if guard._space.free < _BOUND + 60_000:
                    disk.free_bytes = guard._space.free
        assert accepted in (9, 10)
