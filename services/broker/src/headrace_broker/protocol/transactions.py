"""AddPartitionsToTxn 0, AddOffsetsToTxn 0, TxnOffsetCommit 0 to 3, EndTxn 0, DescribeProducers 0, DescribeTransactions
0 and ListTransactions 0 to 1."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from headrace_broker.protocol.groups import CommittedTopic
from headrace_broker.wire import Bool, Int16, Int32, Int64, NullableString, Since, String


class AddedTopic(NamedTuple):
    """Partitions of a topic to add to the transaction."""

    name: String
    partitions: tuple[Int32, ...]


class AddPartitionsToTxnRequest(NamedTuple):
    """AddPartitionsToTxn request (API key 24): partitions that the transaction will write to."""

    transactional_id: String
    producer_id: Int64
    producer_epoch: Int16
    topics: tuple[AddedTopic, ...]


class AddPartitionsToTxnResponse(NamedTuple):
    """AddPartitionsToTxn response (API key 24): result for each partition."""

    throttle_time_ms: Int32
    topics: tuple[CommittedTopic, ...]


class AddOffsetsToTxnRequest(NamedTuple):
    """AddOffsetsToTxn request (API key 25). The transaction will commit offsets of this group."""

    transactional_id: String
    producer_id: Int64
    producer_epoch: Int16
    group_id: String


class AddOffsetsToTxnResponse(NamedTuple):
    """AddOffsetsToTxn response (API key 25): whether the group was added."""

    throttle_time_ms: Int32
    error_code: Int16


class TxnCommitPartition(NamedTuple):
    """Offset of the next record of a partition. The leader epoch is unused."""

    partition: Int32
    offset: Int64
    leader_epoch: Annotated[Int32, Since(2, -1)]
    metadata: NullableString


class TxnCommitTopic(NamedTuple):
    """Offsets to commit for a topic."""

    name: String
    partitions: tuple[TxnCommitPartition, ...]


class TxnOffsetCommitRequest(NamedTuple):
    """TxnOffsetCommit request (API key 28). The offsets take effect when the transaction commits.

    A member of the group sends its member id and generation, and is refused if they are outdated (KIP-447).
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
    """TxnOffsetCommit response (API key 28): result for each partition."""

    throttle_time_ms: Int32
    topics: tuple[CommittedTopic, ...]


class EndTxnRequest(NamedTuple):
    """EndTxn request (API key 26): commit or abort the open transaction."""

    transactional_id: String
    producer_id: Int64
    producer_epoch: Int16
    committed: Bool


class EndTxnResponse(NamedTuple):
    """EndTxn response (API key 26): whether the transaction has ended."""

    throttle_time_ms: Int32
    error_code: Int16


class ProducersTopic(NamedTuple):
    """Partitions of a topic to describe."""

    name: String
    partitions: tuple[Int32, ...]


class DescribeProducersRequest(NamedTuple):
    """DescribeProducers request (API key 61): partitions whose producers are requested."""

    topics: tuple[ProducersTopic, ...]


class ActiveProducer(NamedTuple):
    """State of a producer in a partition. `open_from` is -1 without an open transaction."""

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
    """Descriptions of the partitions of a topic."""

    name: String
    partitions: tuple[DescribedPartition, ...]


class DescribeProducersResponse(NamedTuple):
    """DescribeProducers response (API key 61): producers of each partition."""

    throttle_time_ms: Int32
    topics: tuple[DescribedProducersTopic, ...]


class DescribeTransactionsRequest(NamedTuple):
    """DescribeTransactions request (API key 65): transactional ids to describe."""

    transactional_ids: tuple[String, ...]


class TransactionTopic(NamedTuple):
    """Partitions of a topic in the transaction."""

    name: String
    partitions: tuple[Int32, ...]


class DescribedTransaction(NamedTuple):
    """Description of a transactional id. `started_ms` is -1 without an open transaction."""

    error_code: Int16
    transactional_id: String
    state: String
    timeout_ms: Int32
    started_ms: Int64
    producer_id: Int64
    producer_epoch: Int16
    topics: tuple[TransactionTopic, ...]


class DescribeTransactionsResponse(NamedTuple):
    """DescribeTransactions response (API key 65): state of each transactional id."""

    throttle_time_ms: Int32
    transactions: tuple[DescribedTransaction, ...]


class ListTransactionsRequest(NamedTuple):
    """ListTransactions request (API key 66). Empty lists and a negative duration do not filter."""

    states: tuple[String, ...]
    producer_ids: tuple[Int64, ...]
    duration_ms: Annotated[Int64, Since(1, -1)]


class ListedTransaction(NamedTuple):
    """A transactional id and its state, `Ongoing` or `Empty`."""

    transactional_id: String
    producer_id: Int64
    state: String


class ListTransactionsResponse(NamedTuple):
    """ListTransactions response (API key 66): transactional ids and their states."""

    throttle_time_ms: Int32
    error_code: Int16
    unknown_states: tuple[String, ...]
    transactions: tuple[ListedTransaction, ...]
