"""`python -m tests.feedback`: feedback of every kind in a random order against an in-order oracle; status 1 when a
line does not hold."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import structlog

from headrace_cli.progress import ProgressDisplay
from tests.feedback.planted import FAULTS
from tests.feedback.playing import differing, replayed, talk

_PLANTED_EVENTS = 300
_SHOWN_MAX = 5


def _line(name: str, problems: list[str], *, holds: bool) -> dict[str, Any]:
    print(f"{'holds' if holds else 'FAILS'}  {name}", flush=True)
    return {"name": name, "holds": holds, "differences": len(problems), "first": problems[:_SHOWN_MAX]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--events", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--database", default="sqlite", help="`database.url` of the scorer")
    parser.add_argument("--report", type=Path, default=Path("reports/test-feedback.json"))
    given = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    began, lines = time.perf_counter(), []
    _, sayings = talk(given.seed, given.events)
    with (
        ProgressDisplay("test-feedback", given.events, unit="events") as progress,
        tempfile.TemporaryDirectory(prefix="headrace-feedback-") as scratch,
    ):

        def tick(done: int) -> None:
            progress.advance(done, doing="telling the scorer")

        folder = Path(scratch)
        problems = asyncio.run(differing(given.database, folder / "all", given.seed, given.events, tick=tick))
        lines.append(_line(f"{given.events} events end as the oracle says", problems, holds=not problems))
        some = asyncio.run(differing(given.database, folder / "sum", given.seed + 1, _PLANTED_EVENTS, "sum"))
        lines.append(_line("so do sums", some, holds=not some))
        again = asyncio.run(replayed(given.seed, given.events))
        lines.append(_line("a replay of them ends the same", again, holds=not again))
        for number, fault in enumerate(FAULTS):
            progress.at(doing=f"planting: {fault.name}")
            with fault.planted():
                found = asyncio.run(differing(given.database, folder / str(number), given.seed, _PLANTED_EVENTS))
            lines.append(_line(f"caught: {fault.name}", found, holds=bool(found)))
    report = {
        "seconds": round(time.perf_counter() - began, 1),
        "seed": given.seed,
        "events": given.events,
        "forms": dict(sorted(Counter(one.form for one in sayings).items())),
        "withdrawn": sum(one.withdrawn for one in sayings),
        "clocks_apart_s": round(max(one.skew_s for one in sayings) - min(one.skew_s for one in sayings)),
        "lines": lines,
    }
    given.report.parent.mkdir(parents=True, exist_ok=True)
    given.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    failed = [line["name"] for line in lines if not line["holds"]]
    print(f"{len(lines)} lines in {report['seconds']} s, {len(failed)} do not hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
