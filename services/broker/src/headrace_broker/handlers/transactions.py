"""Handlers of transactions: AddPartitionsToTxn, AddOffsetsToTxn, TxnOffsetCommit, EndTxn, and those that list and
describe transactions and producers."""

from __future__ import annotations

from functools import partial
from itertools import groupby

from headrace_broker import reads
from headrace_broker.broker import Broker, RequestContext
from headrace_broker.errors import Code, Rejected
from headrace_broker.handlers.groups import accepted_topics, check_offset, commit_results
from headrace_broker.protocol.groups import CommitPartition, CommittedPartition, CommittedTopic, CommitTopic
from headrace_broker.protocol.transactions import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    DescribedPartition,
    DescribedProducersTopic,
    DescribedTransaction,
    DescribeProducersRequest,
    DescribeProducersResponse,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    EndTxnRequest,
    EndTxnResponse,
    ListedTransaction,
    ListTransactionsRequest,
    ListTransactionsResponse,
    TransactionTopic,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
)
from headrace_broker.transactions import Transaction


async def add_partitions(
    broker: Broker, call: RequestContext, request: AddPartitionsToTxnRequest
) -> AddPartitionsToTxnResponse:
    """Handle AddPartitionsToTxn: add all partitions of the request to the transaction, or none if one does not
    exist."""
    views = {(topic.name, n): broker.catalog.view(topic.name, n) for topic in request.topics for n in topic.partitions}
    codes = {
        key: Code.OPERATION_NOT_ATTEMPTED if view else Code.UNKNOWN_TOPIC_OR_PARTITION for key, view in views.items()
    }
    ids = {view.id for view in views.values() if view}
    if all(views.values()):
        add = partial(
            broker.transactions.add_partitions,
            request.transactional_id,
            request.producer_id,
            request.producer_epoch,
            ids,
            broker.now_ms(),
        )
        outcome = Code.NONE
        try:
            await broker.writer.submit(add)
        except Rejected as error:
            outcome = error.code
        codes = dict.fromkeys(views, outcome)
    return AddPartitionsToTxnResponse(
        0,
        tuple(
            CommittedTopic(topic.name, tuple(CommittedPartition(n, codes[topic.name, n]) for n in topic.partitions))
            for topic in request.topics
        ),
    )


async def add_offsets(broker: Broker, call: RequestContext, request: AddOffsetsToTxnRequest) -> AddOffsetsToTxnResponse:
    """Handle AddOffsetsToTxn: begin the transaction unless it is open. It will commit offsets of a group."""
    broker.coordinator.ensure_group(request.group_id)
    add = partial(
        broker.transactions.add_group,
        request.transactional_id,
        request.producer_id,
        request.producer_epoch,
        broker.now_ms(),
    )
    await broker.writer.submit(add)
    return AddOffsetsToTxnResponse(0, Code.NONE)


async def txn_offset_commit(
    broker: Broker, call: RequestContext, request: TxnOffsetCommitRequest
) -> TxnOffsetCommitResponse:
    """Handle TxnOffsetCommit: store offsets that are committed when the transaction commits."""
    topics = tuple(
        CommitTopic(topic.name, tuple(CommitPartition(p.partition, p.offset, p.metadata) for p in topic.partitions))
        for topic in request.topics
    )
    codes = {
        (topic.name, p.partition): check_offset(broker, topic.name, p) for topic in topics for p in topic.partitions
    }
    commit = partial(
        broker.transactions.commit_offsets,
        request.transactional_id,
        request.producer_id,
        request.producer_epoch,
        request.group_id,
        accepted_topics(topics, codes),
    )
    failure = Code.NONE
    try:
        broker.coordinator.check_transactional_commit(request)
        await broker.writer.submit(commit)
    except Rejected as error:
        failure = error.code
    return TxnOffsetCommitResponse(0, commit_results(topics, codes, failure))


async def end_txn(broker: Broker, call: RequestContext, request: EndTxnRequest) -> EndTxnResponse:
    """Handle EndTxn: commit or abort the open transaction."""
    end = partial(
        broker.transactions.end,
        request.transactional_id,
        request.producer_id,
        request.producer_epoch,
        commit=request.committed,
        now_ms=broker.now_ms(),
    )
    await broker.writer.submit(end)
    return EndTxnResponse(0, Code.NONE)


_ONGOING, _EMPTY = "Ongoing", "Empty"
_STATES = (_ONGOING, _EMPTY)


async def list_transactions(
    broker: Broker, call: RequestContext, request: ListTransactionsRequest
) -> ListTransactionsResponse:
    """Handle ListTransactions. Of Kafka's states only `Ongoing` and `Empty` occur, because a transaction ends in one
    step."""
    now_ms = broker.now_ms()
    listed = [
        ListedTransaction(t.id, t.producer_id, _state(t))
        for t in await broker.writer.submit(broker.transactions.all)
        if (not request.states or _state(t) in request.states)
        and (not request.producer_ids or t.producer_id in request.producer_ids)
        and (request.duration_ms < 0 or (t.started_ms is not None and now_ms - t.started_ms >= request.duration_ms))
    ]
    unknown = tuple(state for state in request.states if state not in _STATES)
    return ListTransactionsResponse(0, Code.NONE, unknown, tuple(listed))


async def describe_transactions(
    broker: Broker, call: RequestContext, request: DescribeTransactionsRequest
) -> DescribeTransactionsResponse:
    """Handle DescribeTransactions: return the state of each transactional id."""
    by_id = {transaction.id: transaction for transaction in await broker.writer.submit(broker.transactions.all)}
    missing = DescribedTransaction(Code.TRANSACTIONAL_ID_NOT_FOUND, "", "", 0, -1, -1, -1, ())
    descriptions = [
        _described(broker, by_id[name]) if name in by_id else missing._replace(transactional_id=name)
        for name in request.transactional_ids
    ]
    return DescribeTransactionsResponse(0, tuple(descriptions))


async def describe_producers(
    broker: Broker, call: RequestContext, request: DescribeProducersRequest
) -> DescribeProducersResponse:
    """Handle DescribeProducers: return the state of each producer of the requested partitions."""
    topics = []
    for topic in request.topics:
        partitions = [await _partition(broker, topic.name, number) for number in topic.partitions]
        topics.append(DescribedProducersTopic(topic.name, tuple(partitions)))
    return DescribeProducersResponse(0, tuple(topics))


async def _partition(broker: Broker, topic: str, number: int) -> DescribedPartition:
    try:
        producers = await broker.readers.run(reads.read_producers, broker.view(topic, number).id)
    except Rejected as error:
        broker.stats.errors[error.code] += 1
        return DescribedPartition(number, error.code, str(error), ())
    return DescribedPartition(number, Code.NONE, None, producers)


def _state(transaction: Transaction) -> str:
    return _EMPTY if transaction.started_ms is None else _ONGOING


def _described(broker: Broker, transaction: Transaction) -> DescribedTransaction:
    views = sorted((v.topic, v.number) for v in broker.catalog.views() if v.id in transaction.partitions)
    topics = tuple(
        TransactionTopic(name, tuple(number for _, number in keys)) for name, keys in groupby(views, lambda key: key[0])
    )
    return DescribedTransaction(
        Code.NONE,
        transaction.id,
        _state(transaction),
        transaction.timeout_ms,
        -1 if transaction.started_ms is None else transaction.started_ms,
        transaction.producer_id,
        transaction.epoch,
        topics,
    )
