"""Feedback of every kind in random order against an in-order oracle."""

from __future__ import annotations

import argparse
import asyncio
import logging
from collections import Counter
from collections.abc import Sequence

import structlog

from tests.feedback.planted import FAULTS, TRAINING_FAULTS
from tests.feedback.playing import differing, replayed, talk
from tests.feedback.sayings import Sampled, Saying
from tests.feedback.training import TRAINED
from tests.system.line import Line, caught, no_problems
from tests.system.program import Program, Run

_PLANTED_EVENTS = 300
_TRAINED_EVENTS = 1_000
"""Events of a play whose experiences are trained. All answers that preferences connect wait for one batch of `dpo`."""


def play(run: Run) -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    seed, events, database = run.seed, run.options.events, run.options.database
    _, feedbacks = talk(seed, events)
    with run.progress(events, "events") as progress:

        def tick(count: int) -> None:
            progress.advance(count, doing="sending feedback to the scorer")

        problems = asyncio.run(differing(database, run.folder / "all", seed, events, tick=tick))
        run.add(no_problems(f"{events} events end as the oracle expects", problems))
        problems = []
        plays = max(1, events // _TRAINED_EVENTS)
        for number in range(plays):
            progress.update(doing=f"training what was said, play {number + 1} of {plays}")
            folder, count = run.folder / f"trained-{number}", min(events, _TRAINED_EVENTS)
            problems += asyncio.run(differing(database, folder, seed + number, count, algorithms=TRAINED))
        name = f"{min(events, _TRAINED_EVENTS * plays)} events end in the weights of {', '.join(TRAINED)}, or are named"
        run.add(no_problems(name, problems))
        for sampled, forms in _forms_by_sampling(feedbacks).items():
            name = f"edits, preferences and other feedback about answers of {sampled}"
            run.add(Line(name, str(forms), "each above 0", min(forms) > 0))
        problems = asyncio.run(differing(database, run.folder / "sum", seed + 1, _PLANTED_EVENTS, "sum"))
        run.add(no_problems("sums end as the oracle expects", problems))
        run.add(no_problems("a replay of the events ends the same", asyncio.run(replayed(seed, events))))
        for number, fault in enumerate(FAULTS):
            progress.update(doing=f"planting: {fault.name}")
            with fault.planted():
                problems = asyncio.run(differing(database, run.folder / str(number), seed, _PLANTED_EVENTS))
            run.add(caught(fault.name, by_the_suite=bool(problems)))
        for number, fault in enumerate(TRAINING_FAULTS, len(FAULTS)):
            progress.update(doing=f"planting: {fault.name}")
            play = differing(database, run.folder / str(number), seed, _PLANTED_EVENTS, algorithms=TRAINED)
            with fault.planted():
                problems = asyncio.run(play)
            run.add(caught(fault.name, by_the_suite=bool(problems)))
    run.figures |= {
        "events": events,
        "forms": dict(sorted(Counter(feedback.form for feedback in feedbacks).items())),
        "withdrawn": sum(feedback.withdrawn for feedback in feedbacks),
        "clocks_apart_s": round(
            max(feedback.skew_s for feedback in feedbacks) - min(feedback.skew_s for feedback in feedbacks)
        ),
    }


def _forms_by_sampling(feedbacks: Sequence[Saying]) -> dict[Sampled, list[int]]:
    """Return the number of edits, preferences and other feedback about answers without logprobs."""
    counts: dict[Sampled, list[int]] = {"temperature 0": [0, 0, 0], "top_p": [0, 0, 0], "foreign": [0, 0, 0]}
    for saying in feedbacks:
        form = {"edit": 0, "preference": 1}.get(saying.form, 2)
        for sampled in {saying.scene.sampled[turn] for turn, _ in saying.answers if turn in saying.scene.sampled}:
            if sampled in counts:
                counts[sampled][form] += not saying.withdrawn
    return counts


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--events", type=int, default=10_000, help="number of events (default: %(default)s)")
    parser.add_argument("--database", default="sqlite", help="`database.url` of the scorer (default: %(default)s)")


PROGRAM = Program("Compare random feedback with an in-order oracle.", play, _add_arguments)
