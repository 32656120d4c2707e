"""Handlers of transactions: AddPartitionsToTxn, AddOffsetsToTxn, TxnOffsetCommit and EndTxn."""

from __future__ import annotations

from functools import partial

from headrace_broker.broker import Broker, RequestContext
from headrace_broker.errors import Code, Rejected
from headrace_broker.handlers.offsets import answers, check, valid
from headrace_broker.protocol.offsets import CommitPartition, CommittedPartition, CommittedTopic, CommitTopic
from headrace_broker.protocol.transactions import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    EndTxnRequest,
    EndTxnResponse,
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
)


async def add_partitions(
    broker: Broker, call: RequestContext, request: AddPartitionsToTxnRequest
) -> AddPartitionsToTxnResponse:
    """Add all partitions, or none if one does not exist."""
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
    """Handle AddOffsetsToTxn."""
    broker.coordinator.enlist(request.group_id)
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
    """Handle TxnOffsetCommit."""
    topics = tuple(
        CommitTopic(topic.name, tuple(CommitPartition(p.partition, p.offset, p.metadata) for p in topic.partitions))
        for topic in request.topics
    )
    codes = {(topic.name, p.partition): check(broker, topic.name, p) for topic in topics for p in topic.partitions}
    commit = partial(
        broker.transactions.commit_offsets,
        request.transactional_id,
        request.producer_id,
        request.producer_epoch,
        request.group_id,
        valid(topics, codes),
    )
    failure = Code.NONE
    try:
        broker.coordinator.check_transactional_commit(request)
        await broker.writer.submit(commit)
    except Rejected as error:
        failure = error.code
    return TxnOffsetCommitResponse(0, answers(topics, codes, failure))


async def end_txn(broker: Broker, call: RequestContext, request: EndTxnRequest) -> EndTxnResponse:
    """Handle EndTxn."""
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
