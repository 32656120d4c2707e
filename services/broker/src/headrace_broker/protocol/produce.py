"""Produce 7 and InitProducerId 0 to 4."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from headrace_broker.wire import Int16, Int32, Int64, NullableString, Records, Since, String


class ProducePartition(NamedTuple):
    """One record batch for a partition."""

    partition: Int32
    records: Records


class ProduceTopic(NamedTuple):
    """The batches for a topic."""

    name: String
    partitions: tuple[ProducePartition, ...]


class ProduceRequest(NamedTuple):
    """Key 0. With `acks` 0 there is no response; 1 and -1 are the same here."""

    transactional_id: NullableString
    acks: Int16
    timeout_ms: Int32
    topics: tuple[ProduceTopic, ...]


class ProducedPartition(NamedTuple):
    """Where a batch is stored; `base_offset` is -1 when it is not."""

    partition: Int32
    error_code: Int16
    base_offset: Int64
    log_append_time_ms: Int64
    log_start_offset: Int64


class ProducedTopic(NamedTuple):
    """The partitions of a topic, as stored."""

    name: String
    partitions: tuple[ProducedPartition, ...]


class ProduceResponse(NamedTuple):
    """Answers key 0 once everything in it is durable."""

    topics: tuple[ProducedTopic, ...]
    throttle_time_ms: Int32


class InitProducerIdRequest(NamedTuple):
    """Key 22. A transactional id takes over from, and fences, whoever had it.

    With producer id and epoch it is the owner, who asks for its next epoch (KIP-360).
    """

    transactional_id: NullableString
    transaction_timeout_ms: Int32
    producer_id: Annotated[Int64, Since(3, -1)] = -1
    producer_epoch: Annotated[Int16, Since(3, -1)] = -1


class InitProducerIdResponse(NamedTuple):
    """Answers key 22."""

    throttle_time_ms: Int32
    error_code: Int16
    producer_id: Int64
    producer_epoch: Int16
