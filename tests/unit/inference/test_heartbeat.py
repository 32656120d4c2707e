"""Heartbeats of a replica fit the event, whatever the replica has to report."""

from __future__ import annotations

import asyncio
from unittest import mock

from headrace_inference.announce import Announcer
from headrace_runtime.clock import SystemClock
from headrace_runtime.kafka.producer import EventProducer
from headrace_schemas import LoadedVersion, Replica
from headrace_schemas.events.routing import LoadState
from headrace_schemas.values.base import utcnow


async def test_a_heartbeat_names_the_ready_versions_when_there_are_more_than_it_holds() -> None:
    counts: dict[LoadState, int] = {"failed": 50, "draining": 10, "loading": 10, "ready": 8}
    states = [state for state, count in counts.items() for _ in range(count)]
    versions = tuple(LoadedVersion(version=f"m@{number:016x}", state=state) for number, state in enumerate(states))
    now, producer = utcnow(), mock.AsyncMock(spec=EventProducer)
    identity = Replica(
        time=now, replica_id="r", url="http://127.0.0.1:1", engine="e", capacity=1, ttl_s=1.0, started_at=now
    )
    announcer = Announcer(producer, SystemClock(), identity, lambda: versions, lambda: 0, 1.0, asyncio.Event())
    await announcer.announce()
    (heartbeat,) = producer.send.await_args.args
    received = Replica.from_json(heartbeat.to_json())
    assert [version.state for version in received.versions] == [
        *["ready"] * 8, *["draining"] * 10, *["loading"] * 10, *["failed"] * 36
    ]  # fmt: skip
