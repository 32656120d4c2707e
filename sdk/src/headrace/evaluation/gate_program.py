"""A gate's program from the same three things: tasks, a play and a score (docs/gate.md)."""

from __future__ import annotations

import asyncio
import sys
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
    Raises `HeadraceError` when a score could not be found, so that the gate fails and nobody is judged by a guess.
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

        while line := await asyncio.to_thread(lines.readline):
            plays.create_task(one(Play.model_validate_json(line)))
