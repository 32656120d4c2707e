"""The process that runs reward functions, `python -m headrace_scorer.functions.worker`, connected to the scorer by
pipes.

User code may print, exit, fork, hang or crash here; to the scorer this is one failed call. Output of user code goes to
standard error, never into the pipe. The working directory and the timers are restored after each call.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from headrace_schemas import Feedback, Trajectory
from headrace_scorer.functions import outcomes
from headrace_scorer.functions.loading import FunctionLoader, LoadError
from headrace_scorer.functions.outcomes import Outcome


def main() -> None:
    """Load the functions, then answer calls until the scorer closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the scorer, which then ends this process
    inbox, outbox = _take_pipes()
    try:
        request = outcomes.LoadRequest.model_validate_json(outcomes.receive(inbox))
        _limit(request.memory_mb)
        loader = FunctionLoader(request.sources)
        try:
            functions = tuple(loader.load(request.specs))
        except LoadError as error:
            return outcomes.send(outbox, outcomes.LoadResponse(error=str(error)).model_dump_json().encode())
        uncovered = loader.modules.uncovered
        answer = outcomes.LoadResponse(functions=functions, sources=loader.sources, uncovered=uncovered)
        outcomes.send(outbox, answer.model_dump_json().encode())
        process, folder = os.getpid(), Path.cwd()
        while True:
            call = outcomes.CallRequest.model_validate_json(outcomes.receive(inbox))
            result = run(loader.callables[call.function], call, outcomes.receive(inbox))
            if os.getpid() != process:  # a copy that the function has forked; its answer would be taken for the next
                os._exit(0)
            _restore(folder)
            outcomes.send(outbox, result.model_dump_json().encode())
    except (EOFError, BrokenPipeError):
        return None


def run(function: Callable[..., object], call: outcomes.CallRequest, trajectory: bytes) -> Outcome:
    """Call a function and return its outcome. Any exception is a failure, `SystemExit` included."""
    try:
        arguments: dict[str, object] = {
            "trajectory": _trajectory(trajectory),
            "feedback": tuple(Feedback.from_stored(event.encode()) for event in call.feedback),
            "context": call.context,
        }
        parameters = inspect.signature(function).parameters
        returned = function(**{name: arguments[name] for name in parameters})
        if inspect.isawaitable(returned):
            returned = asyncio.run(_await_result(returned))
        return outcomes.outcome_of(returned)
    except BaseException as error:  # noqa: BLE001 (a reward function may do anything)
        return outcomes.outcome_of_error(error)


def _restore(folder: Path) -> None:
    """Restore the working directory and the timers of the process after a call."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    with contextlib.suppress(OSError):
        os.chdir(folder)


async def _await_result(returned: object) -> object:
    assert inspect.isawaitable(returned)
    return await returned


@lru_cache(maxsize=1)
def _trajectory(value: bytes) -> Trajectory:
    """Parse a trajectory. The last one is cached, because all functions of a trajectory are called in succession."""
    return Trajectory.from_stored(value)


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Return the pipes to the scorer, and redirect user code: no standard input, standard output to standard error."""
    inbox, outbox = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return inbox, outbox


def _limit(memory_mb: int | None) -> None:
    if memory_mb is not None and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (memory_mb << 20, memory_mb << 20))


if __name__ == "__main__":
    main()
