"""The account of a running system: reads the topics and keeps the books."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.topics import Progress, Range, connected
from headrace_cli import guard
from headrace_cli.account import TOPICS, Account, Books

_REPORT_EVERY = 100


async def findings_of(bus: str) -> tuple[guard.Finding, ...]:
    """What the rewards and scores at `bus` show together; see `headrace_cli.guard`."""
    async with connected(bus) as topics:
        return await guard.read(topics)


async def account_of(
    bus: str, lineages: Mapping[str, str] | None = None, report: Callable[[int, int], None] | None = None
) -> Account:
    """Account for everything that the topics at `bus` hold now. `report` hears (records read, records in all).

    End offsets are taken effects first, so that each effect that is read has its cause in what is read. Records that
    are no events (a service has dead-lettered them) were never captured and are passed over.
    """
    books, complete, read = Books(lineages), True, 0
    async with connected(bus) as topics:
        ends = await topics.ends(TOPICS)
        total = sum(sum(partitions.values()) for partitions in ends.values())
        for topic in TOPICS:
            progress = Progress()
            async for entry in topics.read(Range(topic), progress, ends[topic]):
                read += 1
                if entry.event is not None:
                    books.add(entry.event)
                if report is not None and read % _REPORT_EVERY == 0:
                    report(read, total)
            complete = complete and not progress.truncated
    if report is not None:
        report(total, total)
    return books.close(complete=complete)
