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
    """Request with API key 0. With `acks` 0 there is no response; 1 and -1 are the same here."""

    transactional_id: NullableString
    acks: Int16
    timeout_ms: Int32
    topics: tuple[ProduceTopic, ...]


class ProducedPartition(NamedTuple):
    """Offset at which a batch is stored. `base_offset` is -1 if it was refused."""

    partition: Int32
    error_code: Int16
    base_offset: Int64
    log_append_time_ms: Int64
    log_start_offset: Int64


class ProducedTopic(NamedTuple):
    """Results for the partitions of a topic."""

    name: String
    partitions: tuple[ProducedPartition, ...]


class ProduceResponse(NamedTuple):
    """Response for API key 0 once all batches are durable."""

    topics: tuple[ProducedTopic, ...]
    throttle_time_ms: Int32


class InitProducerIdRequest(NamedTuple):
    """Request with API key 22. With a transactional id the caller becomes its owner, and the previous owner is fenced.

    An owner sends its producer id and epoch to get its next epoch (KIP-360).
    """

    transactional_id: NullableString
    transaction_timeout_ms: Int32
    producer_id: Annotated[Int64, Since(3, -1)] = -1
    producer_epoch: Annotated[Int16, Since(3, -1)] = -1


class InitProducerIdResponse(NamedTuple):
    """Response for API key 22."""

    throttle_time_ms: Int32
    error_code: Int16
    producer_id: Int64
    producer_epoch: Int16
