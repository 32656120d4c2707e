"""AddPartitionsToTxn 0, AddOffsetsToTxn 0, TxnOffsetCommit 0 and EndTxn 0."""

from __future__ import annotations

from typing import NamedTuple

from headrace_broker.protocol.offsets import CommittedTopic, CommitTopic
from headrace_broker.wire import Bool, Int16, Int32, Int64, String


class AddedTopic(NamedTuple):
    """Partitions that will take part."""

    name: String
    partitions: tuple[Int32, ...]


class AddPartitionsToTxnRequest(NamedTuple):
    """Key 24."""

    transactional_id: String
    producer_id: Int64
    producer_epoch: Int16
    topics: tuple[AddedTopic, ...]


class AddPartitionsToTxnResponse(NamedTuple):
    """Answers key 24."""

    throttle_time_ms: Int32
    topics: tuple[CommittedTopic, ...]


class AddOffsetsToTxnRequest(NamedTuple):
    """Key 25. The transaction will commit offsets of this group."""

    transactional_id: String
    producer_id: Int64
    producer_epoch: Int16
    group_id: String


class AddOffsetsToTxnResponse(NamedTuple):
    """Answers key 25."""

    throttle_time_ms: Int32
    error_code: Int16


class TxnOffsetCommitRequest(NamedTuple):
    """Key 28. The offsets are the group's once the transaction commits."""

    transactional_id: String
    group_id: String
    producer_id: Int64
    producer_epoch: Int16
    topics: tuple[CommitTopic, ...]


class TxnOffsetCommitResponse(NamedTuple):
    """Answers key 28."""

    throttle_time_ms: Int32
    topics: tuple[CommittedTopic, ...]


class EndTxnRequest(NamedTuple):
    """Key 26."""

    transactional_id: String
    producer_id: Int64
    producer_epoch: Int16
    committed: Bool


class EndTxnResponse(NamedTuple):
    """Answers key 26."""

    throttle_time_ms: Int32
    error_code: Int16
