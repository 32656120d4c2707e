"""The same tasks as a gate's program: it names them, then answers each play with a metric's value (docs/gate.md)."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO

from headrace.errors import HeadraceError, UsageError
from headrace_operations.evaluation.runner import EvaluationOptions, Player
from headrace_operations.evaluation.task_metrics import chosen, value_of
from headrace_operations.evaluation.tasks import EvaluationTask, splits
from headrace_schemas.gate import Play


def serve(
    tasks: Sequence[EvaluationTask],
    options: EvaluationOptions,
    source: TextIO | None = None,
    target: TextIO | None = None,
) -> None:
    """Until standard input ends. Raises `HeadraceError` with the first play that has no score: the registry then begins
    the trial again, for a failure is no wrong answer (P6)."""
    if len(options.metrics) != 1:
        raise UsageError(f"a gate has one score: name one --metric, not {len(options.metrics)}")
    ((name, metric),) = chosen(options.metrics).items()
    by_name = {task.name: task for task in tasks}
    out, lock = target or sys.stdout, threading.Lock()
    failures: list[Exception] = []
    names = splits(tasks)

    def answer(play: Play) -> None:
        try:
            score = value_of(name, metric, by_name[play.task], player.play(play.version, by_name[play.task], play.seed))
            if score is None or not 0 <= score <= 1:
                raise HeadraceError(f"{name} is {score} on task {play.task!r}; a gate's scores lie in 0..1")
            line = json.dumps({"version": play.version, "task": play.task, "seed": play.seed, "score": score})
            with lock:
                out.write(line + "\n")
                out.flush()
        except Exception as error:  # noqa: BLE001 (raised by who reads)
            failures.append(error)

    player = Player(options)
    out.write(json.dumps(names) + "\n")
    out.flush()
    try:
        with ThreadPoolExecutor(options.concurrency) as pool:
            for line in source or sys.stdin:
                if failures:
                    break
                pool.submit(answer, Play.model_validate_json(line))
    finally:
        player.close()
    if failures:
        raise failures[0]
