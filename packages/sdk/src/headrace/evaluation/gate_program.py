"""A gate's program from the same three things: tasks, a play and a score (docs/gate.md)."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Mapping
from typing import TextIO

from headrace.client import Client
from headrace.errors import HeadraceError
from headrace.evaluation.evaluating import Measure, measured
from headrace.practice.runs import Play as PlayFunction
from headrace.practice.runs import Run
from headrace.stack import Addresses, Stack
from headrace_schemas.gate import Play, Played, Tasks


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
    """Name the tasks, then play what each line of standard input asks for, until it ends.

    `score` is in 0..1. The agent's own failure scores 0 here, other than in training: a version that fails is worse.
    Ends at once with an `ExceptionGroup` of `HeadraceError` when a score could not be found, so that the gate fails and
    nobody is judged by a guess.
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
    known, saying = {**gate, **audit}, asyncio.Lock()
    print(Tasks(gate=tuple(gate), audit=tuple(audit)).model_dump_json(), file=out, flush=True)
    with Client(base_url) as root:
        stack = Stack(Addresses(gateway=root.root), "")
    async with stack.async_client() as client, asyncio.TaskGroup() as plays:

        async def one(wanted: Play) -> None:
            run = Run(stack, client, known[wanted.task], purpose="eval", model=wanted.version, needs_reward=False)
            await run.played(play)
            try:
                found = 0.0 if run.error else await measured(score, run.task, run.result)
            except Exception as error:
                raise HeadraceError(f"task {wanted.task}: its score failed: {error}") from error
            if found is None:
                raise HeadraceError(f"task {wanted.task}: its score abstained, and a gate needs one for each play")
            said = Played(version=wanted.version, task=wanted.task, seed=wanted.seed, score=found)
            async with saying:
                print(said.model_dump_json(), file=out, flush=True)

        asked = _read_aside(lines)
        while line := await asked.get():
            plays.create_task(one(Play.model_validate_json(line)))


def _read_aside(lines: TextIO) -> asyncio.Queue[str]:
    """Each line, and an empty one for the end. Nobody waits for the thread: it may read for as long as the registry
    keeps the input open, and the registry waits for answers."""
    loop, found = asyncio.get_running_loop(), asyncio.Queue[str]()

    def read() -> None:
        with contextlib.suppress(RuntimeError, ValueError):  # the program is over: its loop or its input is closed
            while line := lines.readline():
                loop.call_soon_threadsafe(found.put_nowait, line)
            loop.call_soon_threadsafe(found.put_nowait, "")

    threading.Thread(target=read, name="gate-input", daemon=True).start()
    return found
