"""Tests of retention, of a disk that fills up, and of topic settings.

Retention deletes by time and by size, removes deleted topics, and returns disk space. Before the disk is full, the
broker refuses new records, serves all other requests, and loses no record. Topic settings are either applied or
refused.
"""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from headrace_broker import cleanup, log
from headrace_broker.batch import parse_produced
from headrace_broker.cleanup import LogBounds
from headrace_broker.errors import Code, Rejected
from headrace_broker.protocol.groups import (
    CommitPartition,
    CommitTopic,
    OffsetCommitRequest,
    OffsetCommitResponse,
)
from headrace_broker.topic_config import TopicConfig, parse
from headrace_runtime.storage.disk import DiskGuard
from tests.support.machine import MeasuredDisk
from tests.support.wire_client import batch
from tests.unit.broker.conftest import Harness, Run


def _expire(broker: Harness, partition_id: int, config: TopicConfig, now_ms: int) -> int:
    """Delete expired records until none is left, and return the number of rounds."""
    times = 0
    while True:
        partition = broker.log.partition(partition_id)
        bounds = LogBounds(partition_id, partition.start, partition.stable, partition.bytes)
        cut = cleanup.retention_offset(broker.reader, bounds, config, now_ms)
        if cut <= bounds.start:
            return times
        broker.run(lambda cut=cut: broker.upkeep.cut(partition_id, cut))  # type: ignore[misc]
        times += 1


def test_old_batches_go_and_the_log_starts_later(broker: Harness) -> None:
    (partition,) = broker.topic()
    for time in (100, 200, 300, 400):
        broker.put(partition, (b"a", b"x"), (b"b", b"y"), timestamps=[time, time])
    _expire(broker, partition, TopicConfig(retention_ms=100), now_ms=400)
    assert [row.timestamp for row in broker.rows(partition, 4)] == [300, 300, 400, 400]
    assert broker.log.partition(partition).start == 4


def test_everything_may_go_and_offsets_go_on(broker: Harness) -> None:
    (partition,) = broker.topic()
    broker.put(partition, (b"a", b"x"), timestamps=[1])
    _expire(broker, partition, TopicConfig(retention_ms=1), now_ms=1_000)
    state = broker.log.partition(partition)
    assert (state.start, state.end, state.bytes) == (1, 1, 0)
    broker.restart()
    assert broker.put(partition, (b"a", b"x")).base_offset == 1


def test_size_keeps_at_least_what_was_asked_for(broker: Harness) -> None:
    (partition,) = broker.topic()
    size = len(batch([(b"a", bytes(100))]))
    for _ in range(10):
        broker.put(partition, (b"a", bytes(100)))
    config = TopicConfig(retention_ms=-1, retention_bytes=3 * size + 5)
    _expire(broker, partition, config, now_ms=10**15)
    state = broker.log.partition(partition)
    assert (state.start, state.bytes) == (6, 4 * size)


def test_no_limit_keeps_everything(broker: Harness) -> None:
    (partition,) = broker.topic()
    broker.put(partition, (b"a", b"x"), timestamps=[1])
    assert _expire(broker, partition, TopicConfig(retention_ms=-1), now_ms=10**15) == 0


def test_undecided_transactions_stay(broker: Harness) -> None:
    (partition,) = broker.topic()
    transactions = broker.transactions
    producer, epoch = broker.run(lambda: transactions.begin_session("tx", 1000, 0))
    broker.run(lambda: transactions.add_partitions("tx", producer, epoch, {partition}, 0))
    broker.put(partition, (b"a", b"x"), timestamps=[1])
    broker.put(
        partition, (b"a", b"x"), timestamps=[1], producer_id=producer, epoch=epoch, sequence=0, transactional=True
    )
    _expire(broker, partition, TopicConfig(retention_ms=1), now_ms=1_000)
    assert broker.log.partition(partition).start == 1


def test_large_logs_go_in_small_commits(broker: Harness) -> None:
    (partition,) = broker.topic()
    for _ in range(1_200):
        broker.put(partition, (b"a", b"x"), timestamps=[1])
    assert _expire(broker, partition, TopicConfig(retention_ms=1), now_ms=1_000) >= 3


def test_batches_of_deleted_topics_are_purged(broker: Harness) -> None:
    remaining, deleted = broker.topic("kept"), broker.topic("gone", 2)
    for partition in (*remaining, *deleted):
        for _ in range(600):
            broker.put(partition, (b"a", b"x"))
    broker.run(lambda: broker.topics.delete("gone"))
    with pytest.raises(Rejected) as caught:
        broker.put(deleted[0], (b"a", b"late"))
    assert caught.value.code is Code.UNKNOWN_TOPIC_OR_PARTITION
    purged = []
    while (partition_id := cleanup.deleted_partition(broker.reader)) is not None:
        purged.append(partition_id)
        while broker.run(lambda: broker.upkeep.purge(partition_id)):
            pass
    assert purged == sorted(deleted)
    assert len(broker.rows(remaining[0])) == 600
    assert broker.db.execute("SELECT count(*) FROM batches").fetchone() == (600,)


def test_the_file_shrinks_when_most_of_it_is_free(broker: Harness) -> None:
    (partition,) = broker.topic()
    for _ in range(30):
        broker.put(partition, (b"a", bytes(1_000_000)), timestamps=[1])
    pages = broker.db.execute("PRAGMA page_count").fetchone()[0]
    _expire(broker, partition, TopicConfig(retention_ms=1), now_ms=1_000)
    while broker.run(broker.upkeep.shrink):
        pass
    assert broker.db.execute("PRAGMA page_count").fetchone()[0] < pages * 0.7


def test_records_without_a_time_are_as_old_as_their_arrival(broker: Harness) -> None:
    (partition,) = broker.topic()
    broker.append(partition, batch([(b"a", b"x")], max_timestamp=-1, base_timestamp=-1), now_ms=500)
    assert _expire(broker, partition, TopicConfig(retention_ms=100), now_ms=600) == 0
    assert _expire(broker, partition, TopicConfig(retention_ms=100), now_ms=601) == 1


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
    """Records accepted since the last disk check count as written, so a fast producer cannot outrun the disk guard."""
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


def test_defaults_are_kafkas() -> None:
    assert parse([]).entries() == {
        "cleanup.policy": "delete",
        "retention.ms": "604800000",
        "retention.bytes": "-1",
        "max.message.bytes": "1048588",
        "delete.retention.ms": "86400000",
        "min.compaction.lag.ms": "0",
    }


@pytest.mark.parametrize("policy", ["compact,delete", "delete,compact", "delete, compact"])
def test_both_policies(policy: str) -> None:
    config = parse([("cleanup.policy", policy)])
    assert config.compacts
    assert config.deletes


@pytest.mark.parametrize(
    ("name", "value"),
    [("segment.bytes", "52428800"), ("message.timestamp.type", "CreateTime"), ("min.insync.replicas", "1")],
)
def test_what_changes_nothing_is_taken_and_shown(name: str, value: str) -> None:
    config = parse([(name, value), ("retention.ms", "-1")])
    assert config.entries()[name] == value
    assert config.non_default() == {name: value, "retention.ms": "-1"}
    assert TopicConfig.unpacked(config.packed()) == config


def test_settings_of_an_older_broker_are_read() -> None:
    assert TopicConfig.unpacked('["compact", 1, 2, 3, 4]') == TopicConfig("compact", 1, 2, 3, 4)


def test_none_means_the_default() -> None:
    assert parse([("retention.ms", None)]) == TopicConfig()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("segment.byte", "1000"),
        ("min.insync.replicas", "2"),
        ("message.timestamp.type", "LogAppendTime"),
        ("compression.type", "zstd"),
        ("retention_ms", "1000"),
        ("retention.msx", "1000"),
        ("cleanup.policy", ""),
        ("cleanup.policy", "compress"),
        ("retention.ms", "-2"),
        ("retention.ms", "1e3"),
        ("retention.bytes", str(1 << 63)),
        ("max.message.bytes", "-1"),
    ],
)
def test_refused_with_the_name_in_the_message(name: str, value: str) -> None:
    with pytest.raises(Rejected, match=name) as caught:
        parse([(name, value)])
    assert caught.value.code is Code.INVALID_CONFIG


def test_a_producer_that_was_not_seen_for_long_is_forgotten(broker: Harness) -> None:
    (partition,) = broker.topic()
    broker.put_once(partition, producer=1, now_ms=10)
    broker.put_once(partition, producer=2, now_ms=20)
    broker.run(lambda: broker.log.forget_producers(20))
    assert broker.log.producer(partition, 1) is None
    assert broker.put_once(partition, producer=2) == 1, "a duplicate"
    assert broker.put_once(partition, producer=1) == 2


def test_a_producer_that_comes_back_in_the_commit_that_forgets_it_is_remembered(broker: Harness) -> None:
    """A producer that writes in the same commit that would expire its state is kept."""
    (partition,) = broker.topic()
    producer, epoch = broker.run(lambda: broker.transactions.begin_session("tx", 1000, 0))
    raw = batch(producer_id=producer, epoch=epoch, sequence=0)
    broker.append(partition, raw, now_ms=10)
    again = batch(producer_id=producer, epoch=epoch, sequence=1, transactional=True)

    def one_commit() -> None:
        broker.transactions.add_partitions("tx", producer, epoch, {partition}, 30)
        broker.log.append(partition, parse_produced(again), 30)
        broker.log.forget_producers(20)

    broker.run(one_commit)
    assert broker.append(partition, again, now_ms=30).base_offset == 1, "a duplicate"
    broker.restart()
    assert broker.log.partition(partition).stable == 1, "its transaction is open"
    broker.run(lambda: broker.transactions.end("tx", producer, epoch, commit=True, now_ms=40))
    assert broker.log.partition(partition).stable == 3


def test_the_producers_that_were_used_last_are_kept_in_memory(broker: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_PRODUCERS_CACHED", 2)
    (partition,) = broker.topic()
    for producer in (1, 2, 3):
        broker.put_once(partition, producer)
    statements: list[str] = []
    broker.db.set_trace_callback(statements.append)
    states = [broker.log.producer(partition, producer) for producer in (2, 3)]
    broker.db.set_trace_callback(None)
    assert all(states)
    assert statements == [], "no query"
    assert broker.log.producer(partition, 1) is not None
