"""Helpers of several benchmarks: jobs in separate processes, peak memory, rank statistics, summaries and databases.

The result of each job is stored in a file and not computed again.
"""

from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import resource
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from headrace_cli.terminal import ProgressDisplay
from tests.support import processes, servers


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
        result_type: builds a result from the contents of a result file.
        alone: use a new process for each job; otherwise a few processes run all jobs.
    """
    processes.start_reaper()
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


_STATUS = Path("/proc/self/status")


def chosen_databases(choice: str, report: dict[str, Any]) -> list[str]:
    """Return the databases of the option `--database`. The report notes why PostgreSQL is left out where it is."""
    names = ["sqlite", "postgres"] if choice == "both" else [choice]
    if "postgres" in names and (reason := servers.missing_postgres()):
        print(f"NOT RUN on postgres: {reason}")
        report["postgres_not_run"] = reason
        names.remove("postgres")
    return names


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes.

    On Linux it is read from `/proc`, because `getrusage` starts with the peak of the parent process.
    """
    if _STATUS.exists():
        (line,) = [line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM")]
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def auroc(score: np.ndarray, good: np.ndarray) -> float:
    """Return the probability that a good item has a higher score than another item; ties count half."""
    up, down = score[good], score[~good]
    return float((up[:, None] > down).mean() + 0.5 * (up[:, None] == down).mean())


@dataclass(frozen=True, slots=True)
class Summary:
    """Sorted measurements, at least one."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        return cls(tuple(sorted(values)))

    def rate(self) -> dict[str, float]:
        """Return the best round, which is the least disturbed, and the median."""
        return {"best": round(self.values[-1]), "median": round(statistics.median(self.values))}

    def latency(self) -> dict[str, float]:
        return {name: round(self.quantile(share), 2) for name, share in {"p50": 0.5, "p95": 0.95, "p99": 0.99}.items()}

    def quantile(self, share: float) -> float:
        """Return the smallest value that `share` of all values do not exceed."""
        return self.values[max(0, math.ceil(share * len(self.values) - 1e-9) - 1)]
