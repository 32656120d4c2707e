"""Handlers of OffsetCommit and OffsetFetch."""

from __future__ import annotations

from collections.abc import Set
from itertools import groupby

from headrace_broker import reads
from headrace_broker.broker import Broker, RequestContext
from headrace_broker.errors import Code, Rejected
from headrace_broker.protocol.offsets import (
    CommitPartition,
    CommittedPartition,
    CommittedTopic,
    CommitTopic,
    FetchedOffset,
    FetchedOffsets,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
    OffsetFetchTopic,
)

_OFFSET_METADATA_BYTES_MAX = 4_096
"""Maximum length of the metadata of a committed offset, as in Apache Kafka."""


async def offset_commit(broker: Broker, call: RequestContext, request: OffsetCommitRequest) -> OffsetCommitResponse:
    """Handle OffsetCommit."""
    codes = {
        (topic.name, p.partition): check(broker, topic.name, p) for topic in request.topics for p in topic.partitions
    }
    failure = Code.NONE
    try:
        await broker.coordinator.commit(request, valid(request.topics, codes))
    except Rejected as error:
        failure = error.code
    return OffsetCommitResponse(0, answers(request.topics, codes, failure))


async def offset_fetch(broker: Broker, call: RequestContext, request: OffsetFetchRequest) -> OffsetFetchResponse:
    """Handle OffsetFetch. As in Kafka, partitions without an offset have the offset -1."""
    if request.require_stable:
        await broker.writer.submit(_do_nothing)  # waits for earlier commits of other clients
    offsets, unstable = await broker.readers.run(reads.committed, request.group_id)
    if not request.require_stable:
        unstable = frozenset()
    topics = request.topics
    if topics is None:
        by_topic = groupby(offsets, key=lambda key: key[0])
        topics = tuple(OffsetFetchTopic(name, tuple(number for _, number in keys)) for name, keys in by_topic)
    answers = tuple(
        FetchedOffsets(t.name, tuple(_fetched(offsets, unstable, t.name, n) for n in t.partitions)) for t in topics
    )
    return OffsetFetchResponse(0, answers, Code.NONE)


def _do_nothing() -> None:
    """Operation without effect, whose future completes after all earlier operations."""


def _fetched(
    offsets: dict[tuple[str, int], tuple[int, str | None]], unstable: Set[tuple[str, int]], topic: str, number: int
) -> FetchedOffset:
    if (topic, number) in unstable:
        return FetchedOffset(number, -1, -1, "", Code.UNSTABLE_OFFSET_COMMIT)
    offset, metadata = offsets.get((topic, number), (-1, ""))
    return FetchedOffset(number, offset, -1, metadata, Code.NONE)


def check(broker: Broker, topic: str, partition: CommitPartition) -> Code:
    """Return the error code of a partition's commit, or NONE if the offset can be committed."""
    if broker.catalog.view(topic, partition.partition) is None:
        return Code.UNKNOWN_TOPIC_OR_PARTITION
    if len(partition.metadata or "") > _OFFSET_METADATA_BYTES_MAX:
        return Code.OFFSET_METADATA_TOO_LARGE
    return Code.NONE


def valid(topics: tuple[CommitTopic, ...], codes: dict[tuple[str, int], Code]) -> tuple[CommitTopic, ...]:
    """Return the topics without refused partitions."""
    return tuple(
        CommitTopic(topic.name, tuple(p for p in topic.partitions if codes[topic.name, p.partition] is Code.NONE))
        for topic in topics
    )


def answers(
    topics: tuple[CommitTopic, ...], codes: dict[tuple[str, int], Code], failure: Code
) -> tuple[CommittedTopic, ...]:
    """Return the response for each partition: its own code, or `failure` if its code is NONE."""
    return tuple(
        CommittedTopic(
            topic.name,
            tuple(CommittedPartition(p.partition, codes[topic.name, p.partition] or failure) for p in topic.partitions),
        )
        for topic in topics
    )
