"""Runs of a benchmark in processes of their own. What was run lies in a folder, a file for each, and is not run
again."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Protocol, TypeVar

from headrace_cli.progress import ProgressDisplay
from tests.support import reaper


class Reported(Protocol):
    """What came of a run."""

    def report(self) -> dict[str, object]:
        """As its file has it."""


class Job(Protocol):
    """A run to be done, as it travels to its process."""

    def place(self, parts: Path) -> Path:
        """The file of what came of it."""


NICE = 5
J = TypeVar("J", bound=Job)
F = TypeVar("F", bound=Reported)


def quietly() -> None:
    """At the start of a run in its process: whoever works at this machine comes first, and nobody logs."""
    import structlog
    import transformers

    os.nice(max(0, NICE - os.nice(0)))
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    transformers.utils.logging.disable_progress_bar()


def play(
    name: str,
    jobs: Sequence[J],
    parts: Path,
    workers: int,
    work: Callable[[J], F],
    found: Callable[..., F],
    *,
    alone: bool = True,
) -> Iterator[F]:
    """What came of all runs, those that were done before first. `name` is that of the benchmark, and
    `found` makes of a report what reported. `alone`: each run has
    a process that had no other one; else a few processes do them all. However this process ends, they end with it."""
    reaper.start()
    parts.mkdir(parents=True, exist_ok=True)
    todo = [job for job in jobs if not job.place(parts).exists()]
    yield from (found(**json.loads(job.place(parts).read_text(encoding="utf-8"))) for job in jobs if job not in todo)
    context = multiprocessing.get_context("spawn")
    with (
        ProgressDisplay(name, len(todo), unit="runs") as progress,
        ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1 if alone else None) as pool,
    ):
        waiting: dict[Future[F], J] = {pool.submit(work, job): job for job in todo}
        while waiting:
            ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in ended:
                place = waiting.pop(future).place(parts)
                ended_run = future.result()
                place.write_text(json.dumps(ended_run.report()), encoding="utf-8")
                progress.advance()
                yield ended_run
