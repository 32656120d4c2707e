"""Gate program made of tasks, a play function and a score function (docs/gate.md)."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Mapping
from typing import TextIO

from headrace.client import Client
from headrace.errors import HeadraceError
from headrace_integrations.evaluation.evaluating import Measure, measure_value
from headrace_integrations.practice.runs import Play as PlayFunction
from headrace_integrations.practice.runs import Run
from headrace_integrations.stack import Addresses, Stack
from headrace_schemas.programs.models import Play, Played, Tasks


def serve_gate(
    gate: Mapping[str, object],
    audit: Mapping[str, object],
    play: PlayFunction,
    score: Measure,
    *,
    base_url: str,
    lines: TextIO | None = None,
    out: TextIO | None = None,
) -> None:
    """Print the task names, then play the requests that arrive on standard input until it ends.

    Args:
        gate: tasks that decide, by name.
        audit: tasks that only measure, by name.
        play: plays one task with the agent.
        score: returns a score from 0 to 1 for the result of a play. In contrast to training, a failed play scores 0
            here, because failures make a version worse.
        base_url: address of the gateway.
        lines: input stream; standard input by default.
        out: output stream; standard output by default.

    Raises:
        ExceptionGroup: of `HeadraceError`, as soon as a score cannot be computed. The gate then fails, so that no
            version is judged by a guess.
    """
    asyncio.run(_serve(gate, audit, play, score, base_url, lines or sys.stdin, out or sys.stdout))


async def _serve(
    gate: Mapping[str, object],
    audit: Mapping[str, object],
    play: PlayFunction,
    score: Measure,
    base_url: str,
    lines: TextIO,
    out: TextIO,
) -> None:
    tasks, output_lock = {**gate, **audit}, asyncio.Lock()
    print(Tasks(gate=tuple(gate), audit=tuple(audit)).model_dump_json(), file=out, flush=True)
    with Client(base_url) as root:
        stack = Stack(Addresses(gateway=root.root), "")
    async with stack.async_client() as client, asyncio.TaskGroup() as plays:

        async def play_request(request: Play) -> None:
            run = Run(stack, client, tasks[request.task], purpose="eval", model=request.version, needs_reward=False)
            await run.execute(play)
            try:
                value = 0.0 if run.error else await measure_value(score, run.task, run.result)
            except Exception as error:
                raise HeadraceError(f"task {request.task}: the score function failed: {error}") from error
            if value is None:
                raise HeadraceError(
                    f"task {request.task}: the score function returned None; return a number for each play of a gate"
                )
            result = Played(version=request.version, task=request.task, seed=request.seed, score=value)
            async with output_lock:
                print(result.model_dump_json(), file=out, flush=True)

        requests = _read_in_thread(lines)
        while line := await requests.get():
            plays.create_task(play_request(Play.model_validate_json(line)))


def _read_in_thread(lines: TextIO) -> asyncio.Queue[str]:
    """Read lines in a thread and put each into the returned queue, then an empty line at the end of the input.

    The thread is never joined, because it may block until the registry closes the input while the registry waits for
    this program.
    """
    loop, queue = asyncio.get_running_loop(), asyncio.Queue[str]()

    def read() -> None:
        with contextlib.suppress(
            RuntimeError, ValueError
        ):  # at the end of the program, its loop or its input is closed
            while line := lines.readline():
                loop.call_soon_threadsafe(queue.put_nowait, line)
            loop.call_soon_threadsafe(queue.put_nowait, "")

    threading.Thread(target=read, name="gate-input", daemon=True).start()
    return queue
