"""Gate program that evaluates the tasks of a file: it sends their names, then a metric's value for each play.

docs/gate.md describes the protocol.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TextIO

from headrace.errors import HeadraceError, UsageError
from headrace_operations.evaluation.runner import EvaluationOptions, Player
from headrace_operations.evaluation.task_metrics import compute_metric, load_metrics
from headrace_operations.evaluation.tasks import EvaluationTask, splits
from headrace_schemas.programs.models import Play


def serve(
    tasks: Sequence[EvaluationTask],
    options: EvaluationOptions,
    source: TextIO | None = None,
    target: TextIO | None = None,
) -> None:
    """Play the requested tasks and write a score for each play, until the input ends.

    Args:
        tasks: the tasks of the file.
        options: the metric, the agent and the gateway.
        source: the input with one `Play` per line; by default standard input.
        target: the output; by default standard output.

    Raises:
        UsageError: `options` does not name exactly one metric.
        HeadraceError: a play has no score. The registry then starts the trial again, because a failure is not a wrong
            answer (P6).
    """
    if len(options.metrics) != 1:
        raise UsageError(f"--metric: a gate has exactly one score, but {len(options.metrics)} metrics were given")
    ((name, metric),) = load_metrics(options.metrics).items()
    by_name = {task.name: task for task in tasks}
    output, lock = target or sys.stdout, threading.Lock()
    failures: list[Exception] = []
    names = splits(tasks)

    def answer(play: Play) -> None:
        try:
            score = compute_metric(
                name, metric, by_name[play.task], player.play(play.version, by_name[play.task], play.seed)
            )
            if score is None or not 0 <= score <= 1:
                raise HeadraceError(f"{name} = {score} on task {play.task!r}: scores of a gate must be in 0..1")
            line = json.dumps({"version": play.version, "task": play.task, "seed": play.seed, "score": score})
            with lock:
                output.write(line + "\n")
                output.flush()
        except Exception as error:  # noqa: BLE001 (the reading loop raises it)
            failures.append(error)

    player = Player(options)
    output.write(json.dumps(names) + "\n")
    output.flush()
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
