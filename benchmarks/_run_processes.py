"""Helpers of several benchmarks: jobs in processes, a private Headrace, peak memory, rank statistics and summaries.

The result of each job is stored in a file and not computed again. The private Headrace has all services except trainer
and judge, for demos that make their versions themselves, with models of known quality: real weights that answer yes
with a chosen probability to any prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import multiprocessing
import os
import resource
import statistics
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from headrace_cli.terminal import ProgressDisplay
from headrace_operations.supervisor import Supervisor
from headrace_operations.supervisor.overrides import Overrides
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import Common
from headrace_runtime.storage.blobs import BlobStore
from tests.support import processes, servers, tiny_model
from tests.support.processes import free_port


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


@dataclass(frozen=True, slots=True)
class LiveStack:
    """A running stack, with the producer and the blob store for new versions."""

    supervisor: Supervisor
    producer: EventProducer
    blobs: BlobStore


@contextlib.asynccontextmanager
async def live_stack(folder: Path, settings: Mapping[str, object]) -> AsyncIterator[LiveStack]:
    """Run a stack with its data in `folder / "data"`, and stop it at the end."""
    supervisor = Supervisor(
        folder / "data",
        settings={**settings, "broker.kafka_port": free_port()},
        without=("trainer", "judge"),
        auto_ports=True,
        environ={name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")},
    )
    blobs = BlobStore.open(Common(data_dir=folder / "data"))
    producer = EventProducer(Overrides(None, {}, {}).bus_settings(supervisor.plan.bus), "headrace/demo", blobs)
    supervisor.start()
    try:
        await asyncio.to_thread(supervisor.wait_up)
        await producer.start()
        yield LiveStack(supervisor, producer, blobs)
    finally:
        await producer.stop()
        await asyncio.to_thread(supervisor.stop)


@dataclass
class Line:
    """Acceptance line with its measured values."""

    name: str
    holds: bool
    details: str


def print_now(text: str) -> None:
    print(text, flush=True)


def report(target: str, lines: Sequence[Line], numbers: Mapping[str, object], wall_s: float) -> int:
    """Print the lines and write `reports/<target>.json`. Return exit status 1 if a line does not hold."""
    print_now("")
    for line in lines:
        print_now(f"{'holds' if line.holds else 'DOES NOT HOLD':14} {line.name}: {line.details}")
    path = Path("reports") / f"{target}.json"
    path.parent.mkdir(exist_ok=True)
    written = {"lines": [vars(line) for line in lines], "numbers": numbers, "wall_s": round(wall_s, 1)}
    path.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    print_now(f"written: {path}")
    return 0 if all(line.holds for line in lines) else 1


YES, NO = "y", "n"
"""Answers: single letters, which are one token in every tokenizer."""
_LOGIT = 14.0
"""Joint logit of both answers. All other tokens together have a probability of about one in a thousand."""


def build(source: Path, folder: Path, *, right: float, seed: int) -> Path:
    """Write a copy of the model in `source` that answers `YES` with probability `right`, else `NO`.

    The last token of a prompt is always the same. The contributions of the layers are removed, and the embeddings of
    the two answers are aligned with the remaining hidden state. All other weights are changed slightly, so that no two
    versions are equal.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()

    tiny_model.perturbed(source, folder, seed=seed, scale=0.01)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    answers = {word: tokenizer.encode(word, add_special_tokens=False)[0] for word in (YES, NO)}
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "x"}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = torch.zeros_like(weights[name])
        if name.endswith("model.norm.weight"):
            weights[name] = torch.ones_like(weights[name])
    table = weights["model.embed_tokens.weight"]
    last = torch.zeros(table.shape[1])
    last[0] = 0.05
    table[:, 0] = 0.0  # no other token is aligned with the last token of the prompt
    table[prompt[-1]] = last
    length = math.sqrt(table.shape[1])
    for token, probability in ((answers[YES], right), (answers[NO], 1.0 - right)):
        table[token] = 0.0
        table[token, 0] = (_LOGIT + math.log(probability)) / length
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
