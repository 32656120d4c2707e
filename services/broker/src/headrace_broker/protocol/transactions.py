"""AddPartitionsToTxn 0, AddOffsetsToTxn 0, TxnOffsetCommit 0 and EndTxn 0."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.protocol.offsets import CommittedTopic, CommitTopic
from headrace_broker.wire import Bool, Int16, Int32, Int64, String


class AddedTopic(NamedTuple):
    name: String
    partitions: tuple[Int32, ...]


class AddPartitionsToTxnRequest(NamedTuple):
    transactional_id: String
    producer_id: Int64
    producer_epoch: Int16
    topics: tuple[AddedTopic, ...]


class AddPartitionsToTxnResponse(NamedTuple):
    throttle_time_ms: Int32
    topics: tuple[CommittedTopic, ...]


class AddOffsetsToTxnRequest(NamedTuple):
    transactional_id: String
    producer_id: Int64
    producer_epoch: Int16
    group_id: String


class AddOffsetsToTxnResponse(NamedTuple):
    throttle_time_ms: Int32
    error_code: Int16


class TxnOffsetCommitRequest(NamedTuple):
    transactional_id: String
    group_id: String
    producer_id: Int64
    producer_epoch: Int16
    topics: tuple[CommitTopic, ...]


class TxnOffsetCommitResponse(NamedTuple):
    throttle_time_ms: Int32
    topics: tuple[CommittedTopic, ...]


class EndTxnRequest(NamedTuple):
    transactional_id: String
    producer_id: Int64
    producer_epoch: Int16
    committed: Bool


class EndTxnResponse(NamedTuple):
    throttle_time_ms: Int32
    error_code: Int16
