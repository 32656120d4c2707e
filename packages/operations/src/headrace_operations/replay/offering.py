"""Offers a replayed version to the registry, which probes and gates it like any other."""

from __future__ import annotations

import asyncio

from headrace.errors import UsageError
from headrace.producing import Outgoing, producing
from headrace.topics import connected, fetch
from headrace_operations.replay.training import checkpoints
from headrace_schemas import Checkpoint
from headrace_schemas.manifest import Manifest
from headrace_schemas.replay import topic_prefix


async def offer(bus: str, lineage: str, version: str | None = None) -> Checkpoint:
    """Announce a version (default: the last one) on `checkpoints`, after the base that an adapter needs.

    Raises `UsageError` when the replay has no such version.
    """
    async with connected(bus) as topics:
        made = await checkpoints(topics, topic_prefix(lineage))
    if not made:
        raise UsageError(f"the replay into lineage {lineage!r} has made no version yet")
    chosen = next((one for one in made if one.version == version), None) if version else made[-1]
    if chosen is None:
        raise UsageError(
            f"lineage {lineage!r} has no version {version}; it has {', '.join(one.version for one in made)}"
        )
    manifest = Manifest.model_validate_json(await asyncio.to_thread(fetch, chosen.manifest))
    needed = [one for one in made if one.version == manifest.base]
    async with producing(bus, "headrace-replay") as producer:
        for one in (*needed, chosen):
            await producer.send([Outgoing.of(one, "headrace/replay")])
    return chosen
