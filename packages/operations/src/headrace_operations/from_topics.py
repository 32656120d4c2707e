"""Turn account and reward findings, read from the topics of a running system."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.topics import Progress, Range, connected
from headrace_operations import guard
from headrace_operations.turn_account import TOPICS, TurnAccount, TurnAccountBuilder

_REPORT_EVERY = 100


async def read_findings(bus: str) -> tuple[guard.Finding, ...]:
    """Return the reward hacking and plateau findings of all models at `bus`; see `headrace_operations.guard`."""
    async with connected(bus) as topics:
        return await guard.read(topics)


async def read_turn_account(
    bus: str, lineages: Mapping[str, str] | None = None, report: Callable[[int, int], None] | None = None
) -> TurnAccount:
    """Read the topics of a bus and count for every captured turn whether it was trained, dropped or still waits.

    End offsets are determined first for topics of results, then for topics of their causes. So the cause of each result
    is among the records that are read. Records that cannot be parsed are skipped: they were never captured, and a
    service has dead-lettered them.

    Args:
        bus: bootstrap servers.
        lineages: lineage to count by model; by default the lineage that reported last.
        report: called with (records read, records in total).
    """
    builder, complete, read = TurnAccountBuilder(lineages), True, 0
    async with connected(bus) as topics:
        ends = await topics.ends(TOPICS)
        total = sum(sum(partitions.values()) for partitions in ends.values())
        for topic in TOPICS:
            progress = Progress()
            async for entry in topics.read(Range(topic), progress, ends[topic]):
                read += 1
                if entry.event is not None:
                    builder.add_or_note(entry.event, f"{entry.topic}[{entry.partition}]@{entry.offset}")
                if report is not None and read % _REPORT_EVERY == 0:
                    report(read, total)
            complete = complete and not progress.truncated
    if report is not None:
        report(total, total)
    return builder.close(complete=complete)
