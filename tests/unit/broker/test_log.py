"""The log's own promises, one by one. The model test has any order; here the cases have names."""

from __future__ import annotations

import pytest

from headrace_broker import log
from headrace_broker.batch import parse_produced
from headrace_broker.errors import Code, Rejected
from headrace_broker.store_format import OFFSET_MAX
from tests.support.record_batches import batch
from tests.unit.broker.harness import Harness


def _put(broker: Harness, partition: int, producer: int, sequence: int = 0, now_ms: int = 0) -> int:
    raw = batch(producer_id=producer, epoch=0, sequence=sequence)
    return broker.append(partition, raw, now_ms).base_offset


def _restart(broker: Harness) -> None:
    broker.close()
    broker.open()


def test_a_new_partition_is_what_a_restart_makes_of_it(broker: Harness) -> None:
    (partition,) = broker.topic()
    created = broker.log.partition(partition)
    _restart(broker)
    assert broker.log.partition(partition) == created


def test_a_topic_that_was_deleted_is_refused(broker: Harness) -> None:
    (partition,) = broker.topic()
    broker.run(lambda: broker.topics.delete("t"))
    with pytest.raises(Rejected) as caught:
        broker.put(partition, (b"k", b"v"))
    assert caught.value.code is Code.UNKNOWN_TOPIC_OR_PARTITION


def test_the_producers_of_a_topic_that_was_deleted_are_forgotten_and_no_others(broker: Harness) -> None:
    deleted, remaining = *broker.topic("gone"), *broker.topic("kept")
    assert _put(broker, deleted, producer=remaining) == 0

    def all_in_one_commit() -> None:
        for partition, producer in ((remaining, deleted), (deleted, 7)):
            once = parse_produced(batch(producer_id=producer, epoch=0, sequence=0))
            broker.log.append(partition, once, 0)
        broker.topics.delete("gone")

    broker.run(all_in_one_commit)
    assert broker.log.producer(deleted, remaining) is broker.log.producer(deleted, 7) is None
    assert _put(broker, remaining, producer=deleted) == 0, "a duplicate"
    assert _put(broker, remaining, producer=deleted, sequence=1) == 1
    assert broker.db.execute("SELECT count(*) FROM producers").fetchone() == (1,)


def test_the_end_of_a_transaction_in_a_topic_that_was_deleted_writes_nothing(broker: Harness) -> None:
    deleted, other = *broker.topic("gone"), *broker.topic("other")
    broker.run(lambda: broker.topics.delete("gone"))
    for partition in (deleted, other):
        broker.run(lambda at=partition: broker.log.end_transaction(at, 1, 0, commit=True, now_ms=0))  # type: ignore[misc]
    assert broker.log.partition(other).end == 0


def test_the_last_offset_is_used_and_none_behind_it(broker: Harness) -> None:
    (partition,) = broker.topic()
    broker.log.partition(partition).end = OFFSET_MAX - 3
    with pytest.raises(Rejected) as caught:
        broker.put(partition, *[(b"k", b"v")] * 4)
    assert caught.value.code is Code.POLICY_VIOLATION
    assert broker.put(partition, *[(b"k", b"v")] * 3).base_offset == OFFSET_MAX - 3
    assert broker.log.partition(partition).end == OFFSET_MAX
    with pytest.raises(Rejected):
        broker.put(partition, (b"k", b"v"))


@pytest.mark.parametrize(("sent", "stored"), [(-1, 77), (0, 0), (1, 1), (99, 99)])
def test_a_batch_without_a_time_has_that_of_its_arrival(broker: Harness, sent: int, stored: int) -> None:
    (partition,) = broker.topic()
    broker.append(partition, batch(max_timestamp=sent), now_ms=77)
    assert broker.log.partition(partition).max_timestamp == stored
    assert broker.db.execute("SELECT max_timestamp, reached_timestamp FROM batches").fetchone() == (stored, stored)


def test_a_producer_that_was_not_seen_for_long_is_forgotten(broker: Harness) -> None:
    (partition,) = broker.topic()
    _put(broker, partition, producer=1, now_ms=10)
    _put(broker, partition, producer=2, now_ms=20)
    broker.run(lambda: broker.log.forget_producers(20))
    assert broker.log.producer(partition, 1) is None
    assert _put(broker, partition, producer=2) == 1, "a duplicate"
    assert _put(broker, partition, producer=1) == 2


def test_a_producer_that_comes_back_in_the_commit_that_forgets_it_is_remembered(broker: Harness) -> None:
    """The writer commits clients' records and maintenance together."""
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
    _restart(broker)
    assert broker.log.partition(partition).stable == 1, "its transaction is open"
    broker.run(lambda: broker.transactions.end("tx", producer, epoch, commit=True, now_ms=40))
    assert broker.log.partition(partition).stable == 3


def test_the_producers_that_were_used_last_are_kept_in_memory(broker: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log, "_PRODUCERS_CACHED", 2)
    (partition,) = broker.topic()
    for producer in (1, 2, 3):
        _put(broker, partition, producer)
    statements: list[str] = []
    broker.db.set_trace_callback(statements.append)
    states = [broker.log.producer(partition, producer) for producer in (2, 3)]
    broker.db.set_trace_callback(None)
    assert all(states)
    assert statements == [], "no query"
    assert broker.log.producer(partition, 1) is not None
