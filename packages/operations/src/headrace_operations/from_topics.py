"""What the topics of a running system say: what became of each turn, and how reward and score move."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.topics import Progress, Range, connected
from headrace_operations import guard
from headrace_operations.turn_account import TOPICS, TurnAccount, TurnAccountBuilder

_REPORT_EVERY = 100


async def findings_of(bus: str) -> tuple[guard.Finding, ...]:
    """What the rewards and scores at `bus` show together; see `headrace_operations.guard`."""
    async with connected(bus) as topics:
        return await guard.read(topics)


async def read_turn_account(
    bus: str, lineages: Mapping[str, str] | None = None, report: Callable[[int, int], None] | None = None
) -> TurnAccount:
    """Account for everything that the topics at `bus` hold now. `report` hears (records read, records in all).

    End offsets are taken effects first, so that each effect that is read has its cause in what is read. Records that
    are no events (a service has dead-lettered them) were never captured and are passed over.
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
