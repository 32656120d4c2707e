"""Announcement of a replayed version to the registry, which probes and gates it like any other."""

from __future__ import annotations

import asyncio

from headrace.errors import UsageError
from headrace.producing import Outgoing, producing
from headrace.topics import connected, fetch
from headrace_operations.replay.training import checkpoints
from headrace_schemas import Checkpoint
from headrace_schemas.programs.replay import topic_prefix
from headrace_schemas.values.blobs import Manifest


async def offer(bus: str, lineage: str, version: str | None = None) -> Checkpoint:
    """Announce a version (by default the last one) on `checkpoints`, after the base that an adapter needs.

    Raises:
        UsageError: the replay has no such version.
    """
    async with connected(bus) as topics:
        versions = await checkpoints(topics, topic_prefix(lineage))
    if not versions:
        raise UsageError(f"lineage {lineage!r}: the replay has no version yet")
    chosen = next((entry for entry in versions if entry.version == version), None) if version else versions[-1]
    if chosen is None:
        raise UsageError(
            f"lineage {lineage!r}: has no version {version}; it has {', '.join(entry.version for entry in versions)}"
        )
    manifest = Manifest.model_validate_json(await asyncio.to_thread(fetch, chosen.manifest))
    bases = [entry for entry in versions if entry.version == manifest.base]
    async with producing(bus, "headrace-replay") as producer:
        for checkpoint in (*bases, chosen):
            await producer.send([Outgoing.of(checkpoint, "headrace/replay")])
    return chosen
