"""A replica without weights that follows the routing: `python -m tests.rollouts.replica FOLDER BUS PORT`.

It loads the routed versions, announces them as probed and answers with them. While the file `FOLDER/loading` names a
version, no other version of its model passes its probe.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path

from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka.consumer import TopicTable
from headrace_runtime.kafka.dead_letters import DeadLetterSender
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import BusSettings, Common
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import LoadedVersion, Probe, Replica, Routing
from headrace_schemas.values.base import utcnow
from tests.support.fake_replica import FakeReplica

LOADING = "loading"
_HEARTBEAT_S = 0.2
_TTL_S = 20.0
"""Validity of a heartbeat in seconds: long for a busy machine; gateways detect a dead replica earlier."""
_DRAIN_BEATS = 15
_PROBE = Probe(max_abs_delta=0.0, passed=True)


class Fleet:
    """The loaded versions, as the routing requires."""

    def __init__(self, folder: Path, replica: FakeReplica) -> None:
        self._hold = folder / LOADING
        self._replica = replica
        self._ready: dict[str, int] = {}
        """Loaded versions, with the number of heartbeats for which each has not been routed."""

    def beat(self, routed: set[str]) -> tuple[LoadedVersion, ...]:
        """Take one step of loading and unloading, and return the state of each version."""
        for version in list(self._ready):
            self._ready[version] = 0 if version in routed else self._ready[version] + 1
            if self._ready[version] > _DRAIN_BEATS:
                del self._ready[version]
        held_version = self._hold.read_text(encoding="utf-8") if self._hold.exists() else ""
        new = routed - self._ready.keys()
        waiting = {
            name for name in new if held_version and _model(name) == _model(held_version) and name != held_version
        }
        self._ready |= dict.fromkeys(new - waiting, 0)
        self._replica.versions = tuple(self._ready)
        ready = [LoadedVersion(version=name, state="ready", probe=_PROBE) for name in sorted(self._ready)]
        return (*ready, *(LoadedVersion(version=name, state="loading") for name in sorted(waiting)))


def _model(version: str) -> str:
    return version.partition("@")[0]


async def serve(folder: Path, bus: str, port: int) -> None:
    """Serve until the process is killed."""
    common = Common(data_dir=folder / "data", bus=BusSettings(address=bus))
    blobs = BlobStore.open(common)
    producer = EventProducer(common.bus, "test-replica", blobs)
    await producer.start()
    rows: dict[str, Routing] = {}

    def routed(model: str, row: Routing | None) -> None:
        if row is not None and (model not in rows or row.revision >= rows[model].revision):
            rows[model] = row

    refuse = DeadLetterSender("test-replica", producer)
    table = TopicTable(Routing, common.bus, "test-replica-routing", blobs, refuse, routed)
    replica = FakeReplica(f"127.0.0.1:{port}", versions=(), capacity=32)
    started = utcnow()
    async with replica.running(port), asyncio.TaskGroup() as group:
        group.create_task(table.run())
        await table.loaded.wait()
        fleet = Fleet(folder, replica)
        while True:
            routed_versions = {served.version for row in rows.values() for served in row.serve}
            beat = Replica(
                time=utcnow(),
                replica_id=replica.replica_id,
                url=replica.url,
                engine="fake",
                versions=fleet.beat(routed_versions),
                capacity=replica.capacity,
                ttl_s=_TTL_S,
                resumes=replica.resumes,
                started_at=started,
            )
            with contextlib.suppress(Unavailable):
                await producer.send(beat)
            await asyncio.sleep(_HEARTBEAT_S)


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
