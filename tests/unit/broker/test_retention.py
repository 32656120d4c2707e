"""Retention by time and by size, topics that were deleted, and a file that gives space back."""

from __future__ import annotations

import pytest

from headrace_broker import retention
from headrace_broker.errors import Rejected
from headrace_broker.retention import Bounds
from headrace_broker.topic_config import TopicConfig
from tests.support.record_batches import batch
from tests.unit.broker.harness import Harness


def _expire(broker: Harness, partition_id: int, config: TopicConfig, now_ms: int) -> int:
    """Remove records until none is removable. Return the number of rounds."""
    times = 0
    while True:
        partition = broker.log.partition(partition_id)
        bounds = Bounds(partition_id, partition.start, partition.stable, partition.bytes)
        cut = retention.expired(broker.reader, bounds, config, now_ms)
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


def test_a_younger_batch_protects_those_behind_it(broker: Harness) -> None:
    (partition,) = broker.topic()
    for time in (100, 500, 100):
        broker.put(partition, (b"a", b"x"), timestamps=[time])
    _expire(broker, partition, TopicConfig(retention_ms=100), now_ms=550)
    assert broker.log.partition(partition).start == 1


def test_everything_may_go_and_offsets_go_on(broker: Harness) -> None:
    (partition,) = broker.topic()
    broker.put(partition, (b"a", b"x"), timestamps=[1])
    _expire(broker, partition, TopicConfig(retention_ms=1), now_ms=1_000)
    state = broker.log.partition(partition)
    assert (state.start, state.end, state.bytes) == (1, 1, 0)
    broker.close()
    broker.open()
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
    with pytest.raises(Rejected):
        broker.put(deleted[0], (b"a", b"late"))
    purged = []
    while (partition_id := retention.deleted_partition(broker.reader)) is not None:
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
