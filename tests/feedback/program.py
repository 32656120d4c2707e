"""Feedback of every kind in random order against an in-order oracle."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections import Counter

import structlog

from tests.feedback.planted import FAULTS
from tests.feedback.playing import differing, replayed, talk
from tests.system.line import caught, no_problems
from tests.system.program import Program, Run

_PLANTED_EVENTS = 300


def play(run: Run) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    seed, events, database = run.seed, run.options.events, run.options.database
    _, feedbacks = talk(seed, events)
    with run.progress(events, "events") as progress:

        def tick(count: int) -> None:
            progress.advance(count, doing="sending feedback to the scorer")

        problems = asyncio.run(differing(database, run.folder / "all", seed, events, tick=tick))
        run.add(no_problems(f"{events} events end as the oracle expects", problems))
        problems = asyncio.run(differing(database, run.folder / "sum", seed + 1, _PLANTED_EVENTS, "sum"))
        run.add(no_problems("sums end as the oracle expects", problems))
        run.add(no_problems("a replay of the events ends the same", asyncio.run(replayed(seed, events))))
        for number, fault in enumerate(FAULTS):
            progress.update(doing=f"planting: {fault.name}")
            with fault.planted():
                problems = asyncio.run(differing(database, run.folder / str(number), seed, _PLANTED_EVENTS))
            run.add(caught(fault.name, by_the_suite=bool(problems)))
    run.figures |= {
        "events": events,
        "forms": dict(sorted(Counter(feedback.form for feedback in feedbacks).items())),
        "withdrawn": sum(feedback.withdrawn for feedback in feedbacks),
        "clocks_apart_s": round(
            max(feedback.skew_s for feedback in feedbacks) - min(feedback.skew_s for feedback in feedbacks)
        ),
    }


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", type=int, default=10_000, help="number of events (default: %(default)s)")
    parser.add_argument("--database", default="sqlite", help="`database.url` of the scorer (default: %(default)s)")


PROGRAM = Program("Compare random feedback with an in-order oracle.", play, _add_arguments)
