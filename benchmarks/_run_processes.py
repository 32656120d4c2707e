"""Run the jobs of a benchmark in separate processes. Results are stored in a folder, one file each, and are not
computed again."""

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
    """Result of a run."""

    def report(self) -> dict[str, object]:
        """Return the contents of the result file."""


class Job(Protocol):
    """Description of a run, as it is sent to its process."""

    def result_file(self, parts: Path) -> Path:
        """Return the path of the result file."""


NICE = 5
J = TypeVar("J", bound=Job)
F = TypeVar("F", bound=Reported)


def quietly() -> None:
    """Prepare a worker process: lower its priority and silence its logs."""
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
    result_type: Callable[..., F],
    *,
    alone: bool = True,
) -> Iterator[F]:
    """Run jobs and yield their results, stored results first. Worker processes end with this process, however it ends.

    Args:
        name: name of the benchmark.
        work: runs one job in a worker process.
        found: builds a result from the contents of a result file.
        alone: use a new process for each job; otherwise a few processes run all jobs.
    """
    reaper.start()
    parts.mkdir(parents=True, exist_ok=True)
    todo = [job for job in jobs if not job.result_file(parts).exists()]
    yield from (
        result_type(**json.loads(job.result_file(parts).read_text(encoding="utf-8"))) for job in jobs if job not in todo
    )
    context = multiprocessing.get_context("spawn")
    with (
        ProgressDisplay(name, len(todo), unit="runs") as progress,
        ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=1 if alone else None) as pool,
    ):
        waiting: dict[Future[F], J] = {pool.submit(work, job): job for job in todo}
        while waiting:
            ended, _ = wait(waiting, return_when=FIRST_COMPLETED)
            for future in ended:
                result_file = waiting.pop(future).result_file(parts)
                ended_run = future.result()
                result_file.write_text(json.dumps(ended_run.report()), encoding="utf-8")
                progress.advance()
                yield ended_run
