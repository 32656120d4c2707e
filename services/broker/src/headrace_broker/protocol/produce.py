"""Produce 7 and InitProducerId 0."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.wire import Int16, Int32, Int64, NullableString, Records, String


class ProducePartition(NamedTuple):
    partition: Int32
    records: Records


class ProduceTopic(NamedTuple):
    name: String
    partitions: tuple[ProducePartition, ...]


class ProduceRequest(NamedTuple):
    transactional_id: NullableString
    acks: Int16
    timeout_ms: Int32
    topics: tuple[ProduceTopic, ...]


class ProducedPartition(NamedTuple):
    partition: Int32
    error_code: Int16
    base_offset: Int64
    log_append_time_ms: Int64
    log_start_offset: Int64


class ProducedTopic(NamedTuple):
    name: String
    partitions: tuple[ProducedPartition, ...]


class ProduceResponse(NamedTuple):
    topics: tuple[ProducedTopic, ...]
    throttle_time_ms: Int32


class InitProducerIdRequest(NamedTuple):
    transactional_id: NullableString
    transaction_timeout_ms: Int32


class InitProducerIdResponse(NamedTuple):
    throttle_time_ms: Int32
    error_code: Int16
    producer_id: Int64
    producer_epoch: Int16
