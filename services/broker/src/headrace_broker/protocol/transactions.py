"""Messages about transactions: AddPartitionsToTxn 0, AddOffsetsToTxn 0, TxnOffsetCommit 0 to 3, EndTxn 0,
DescribeProducers 0, DescribeTransactions 0 and ListTransactions 0 to 1."""

from __future__ import annotations

from typing import Annotated, NamedTuple

from headrace_broker.protocol.groups import CommittedTopic
from headrace_broker.wire import Bool, Int16, Int32, Int64, NullableString, Since, String


class AddedTopic(NamedTuple):
    """Partitions of a topic that are to be added to the transaction."""

    name: String
    partitions: tuple[Int32, ...]


class AddPartitionsToTxnRequest(NamedTuple):
    """AddPartitionsToTxn request (API key 24) with partitions to which the transaction will write."""

    transactional_id: String
    producer_id: Int64
    producer_epoch: Int16
    topics: tuple[AddedTopic, ...]


class AddPartitionsToTxnResponse(NamedTuple):
    """AddPartitionsToTxn response (API key 24) with an error code for each partition."""

    throttle_time_ms: Int32
    topics: tuple[CommittedTopic, ...]


class AddOffsetsToTxnRequest(NamedTuple):
    """AddOffsetsToTxn request (API key 25) with a group whose offsets the transaction will commit."""

    transactional_id: String
    producer_id: Int64
    producer_epoch: Int16
    group_id: String


class AddOffsetsToTxnResponse(NamedTuple):
    """AddOffsetsToTxn response (API key 25) with an error code."""

    throttle_time_ms: Int32
    error_code: Int16


class TxnCommitPartition(NamedTuple):
    """Offset to commit for a partition: that of the next record to read. The leader epoch is ignored."""

    partition: Int32
    offset: Int64
    leader_epoch: Annotated[Int32, Since(2, -1)]
    metadata: NullableString


class TxnCommitTopic(NamedTuple):
    """Offsets to commit for the partitions of a topic."""

    name: String
    partitions: tuple[TxnCommitPartition, ...]


class TxnOffsetCommitRequest(NamedTuple):
    """TxnOffsetCommit request (API key 28) with offsets that are committed when the transaction commits.

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
    """TxnOffsetCommit response (API key 28) with an error code for each partition."""

    throttle_time_ms: Int32
    topics: tuple[CommittedTopic, ...]


class EndTxnRequest(NamedTuple):
    """EndTxn request (API key 26), which commits or aborts the open transaction."""

    transactional_id: String
    producer_id: Int64
    producer_epoch: Int16
    committed: Bool


class EndTxnResponse(NamedTuple):
    """EndTxn response (API key 26) with an error code."""

    throttle_time_ms: Int32
    error_code: Int16


class ProducersTopic(NamedTuple):
    """Partitions of a topic whose producers are requested."""

    name: String
    partitions: tuple[Int32, ...]


class DescribeProducersRequest(NamedTuple):
    """DescribeProducers request (API key 61) with partitions whose producers are requested."""

    topics: tuple[ProducersTopic, ...]


class ActiveProducer(NamedTuple):
    """State of one producer in a partition. `open_from` is the first offset of its open transaction, or -1 if it has
    none."""

    producer_id: Int64
    producer_epoch: Int32
    last_sequence: Int32
    last_timestamp: Int64
    coordinator_epoch: Int32
    open_from: Int64


class DescribedPartition(NamedTuple):
    """States of all producers of a partition."""

    partition: Int32
    error_code: Int16
    error_message: NullableString
    producers: tuple[ActiveProducer, ...]


class DescribedProducersTopic(NamedTuple):
    """States of the producers of a topic's partitions."""

    name: String
    partitions: tuple[DescribedPartition, ...]


class DescribeProducersResponse(NamedTuple):
    """DescribeProducers response (API key 61) with the producers of each partition."""

    throttle_time_ms: Int32
    topics: tuple[DescribedProducersTopic, ...]


class DescribeTransactionsRequest(NamedTuple):
    """DescribeTransactions request (API key 65) with transactional ids."""

    transactional_ids: tuple[String, ...]


class TransactionTopic(NamedTuple):
    """Partitions of a topic to which the transaction writes."""

    name: String
    partitions: tuple[Int32, ...]


class DescribedTransaction(NamedTuple):
    """State of one transactional id. `started_ms` is the time at which its open transaction began, or -1 if it has
    none."""

    error_code: Int16
    transactional_id: String
    state: String
    timeout_ms: Int32
    started_ms: Int64
    producer_id: Int64
    producer_epoch: Int16
    topics: tuple[TransactionTopic, ...]


class DescribeTransactionsResponse(NamedTuple):
    """DescribeTransactions response (API key 65) with the state of each transactional id."""

    throttle_time_ms: Int32
    transactions: tuple[DescribedTransaction, ...]


class ListTransactionsRequest(NamedTuple):
    """ListTransactions request (API key 66). The fields are filters; empty lists and a negative duration select all."""

    states: tuple[String, ...]
    producer_ids: tuple[Int64, ...]
    duration_ms: Annotated[Int64, Since(1, -1)]


class ListedTransaction(NamedTuple):
    """Transactional id in a list, with its state: `Ongoing` or `Empty`."""

    transactional_id: String
    producer_id: Int64
    state: String


class ListTransactionsResponse(NamedTuple):
    """ListTransactions response (API key 66) with the selected transactional ids."""

    throttle_time_ms: Int32
    error_code: Int16
    unknown_states: tuple[String, ...]
    transactions: tuple[ListedTransaction, ...]
