"""AddPartitionsToTxn 0, AddOffsetsToTxn 0, TxnOffsetCommit 0 to 3 and EndTxn 0; what administrators ask about them:
DescribeProducers 0, DescribeTransactions 0 and ListTransactions 0 to 1."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from headrace_broker.protocol.offsets import CommittedTopic
from headrace_broker.wire import Bool, Int16, Int32, Int64, NullableString, Since, String


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


class TxnCommitPartition(NamedTuple):
    """The offset to go on from; the leader epoch is between brokers and unused."""

    partition: Int32
    offset: Int64
    leader_epoch: Annotated[Int32, Since(2, -1)]
    metadata: NullableString


class TxnCommitTopic(NamedTuple):
    """The partitions of a topic to commit."""

    name: String
    partitions: tuple[TxnCommitPartition, ...]


class TxnOffsetCommitRequest(NamedTuple):
    """Key 28. The offsets are the group's once the transaction commits.

    Who consumes in the group says so with member and generation, and is refused when it no longer does (KIP-447).
    """

    transactional_id: String
    group_id: String
    producer_id: Int64
    producer_epoch: Int16
    generation_id: Annotated[Int32, Since(3, -1)]
    member_id: Annotated[String, Since(3, "")]
    group_instance_id: Annotated[NullableString, Since(3, None)]
    topics: tuple[TxnCommitTopic, ...]


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


class ProducersTopic(NamedTuple):
    """Partitions to describe."""

    name: String
    partitions: tuple[Int32, ...]


class DescribeProducersRequest(NamedTuple):
    """Key 61."""

    topics: tuple[ProducersTopic, ...]


class ActiveProducer(NamedTuple):
    """A producer that a partition remembers; -1 when it has no open transaction there."""

    producer_id: Int64
    producer_epoch: Int32
    last_sequence: Int32
    last_timestamp: Int64
    coordinator_epoch: Int32
    open_from: Int64


class DescribedPartition(NamedTuple):
    """The producers of a partition."""

    partition: Int32
    error_code: Int16
    error_message: NullableString
    producers: tuple[ActiveProducer, ...]


class DescribedProducersTopic(NamedTuple):
    """The partitions of a topic, as described."""

    name: String
    partitions: tuple[DescribedPartition, ...]


class DescribeProducersResponse(NamedTuple):
    """Answers key 61."""

    throttle_time_ms: Int32
    topics: tuple[DescribedProducersTopic, ...]


class DescribeTransactionsRequest(NamedTuple):
    """Key 65."""

    transactional_ids: tuple[String, ...]


class TransactionTopic(NamedTuple):
    """Partitions that take part."""

    name: String
    partitions: tuple[Int32, ...]


class DescribedTransaction(NamedTuple):
    """A transactional id; `started_ms` is -1 while nothing is open."""

    error_code: Int16
    transactional_id: String
    state: String
    timeout_ms: Int32
    started_ms: Int64
    producer_id: Int64
    producer_epoch: Int16
    topics: tuple[TransactionTopic, ...]


class DescribeTransactionsResponse(NamedTuple):
    """Answers key 65."""

    throttle_time_ms: Int32
    transactions: tuple[DescribedTransaction, ...]


class ListTransactionsRequest(NamedTuple):
    """Key 66. Empty filters and a negative duration let everything through."""

    states: tuple[String, ...]
    producer_ids: tuple[Int64, ...]
    duration_ms: Annotated[Int64, Since(1, -1)]


class ListedTransaction(NamedTuple):
    """A transactional id and its state, `Ongoing` or `Empty`."""

    transactional_id: String
    producer_id: Int64
    state: String


class ListTransactionsResponse(NamedTuple):
    """Answers key 66."""

    throttle_time_ms: Int32
    error_code: Int16
    unknown_states: tuple[String, ...]
    transactions: tuple[ListedTransaction, ...]
