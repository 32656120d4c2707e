"""Runs of a benchmark in processes of their own, each kept in a file: what was done is not done again."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, Protocol, TypeVar

from headrace_cli.progress import ProgressDisplay


class Reported(Protocol):
    """What came of a run."""

    def report(self) -> dict[str, Any]:
        """As JSON."""


J = TypeVar("J")


def reports(
    title: str, jobs: Mapping[Path, J], work: Callable[[J], Reported], workers: int
) -> Iterator[dict[str, Any]]:
    """The report of each job, by the file where it is kept; those that were done before first."""
    todo = {place: job for place, job in jobs.items() if not place.exists()}
    yield from (json.loads(place.read_text(encoding="utf-8")) for place in jobs if place not in todo)
    context = multiprocessing.get_context("spawn")
    with (
        ProgressDisplay(title, len(todo), unit="runs") as progress,
        ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1) as pool,
    ):
        waiting: dict[Future[Reported], Path] = {pool.submit(work, job): place for place, job in todo.items()}
        while waiting:
            ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in ended:
                place, found = waiting.pop(future), future.result().report()
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_text(json.dumps(found), encoding="utf-8")
                progress.advance()
                yield found


def quietly() -> None:
    """In a process of its own: no log, no bars, and whoever works at this machine comes first."""
    import structlog
    import transformers

    os.nice(max(0, 5 - os.nice(0)))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    transformers.utils.logging.disable_progress_bar()
