"""`python -m headrace_registry.gate_workers SETTINGS`: a program for the gate (`headrace_schemas.programs`) that
distributes plays among workers. SETTINGS is the section `[registry.gate]` as JSON."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterable
from typing import TextIO

from headrace_registry.gate.gate import GateFailed
from headrace_registry.gate_workers.on_ray import PlayDispatcher, WorkerLost
from headrace_registry.settings import GateSettings
from headrace_runtime.errors import Unavailable
from headrace_schemas.programs import Play, PlayResult

_PLACED_SHARE = 0.8
"""Fraction of `silence_s` within which the workers must start, so that this program can report the failure before the
registry kills it."""
_LINE_BYTES_MAX = 1_048_576
"""Maximum bytes of one line of input, which names one task."""


async def serve(dealer: PlayDispatcher, lines: AsyncIterable[str | bytes], out: TextIO, start_s: float) -> None:
    """Print the score of each play that an input line requests, until the input ends."""
    try:
        async with asyncio.timeout(start_s):
            tasks = await dealer.tasks()
    except TimeoutError:
        raise GateFailed(
            f"Ray has not started all workers within {start_s:g} s; check whether the cluster has free CPUs"
        ) from None
    except WorkerLost as error:
        raise GateFailed(f"a worker was lost before it had named its tasks: {error}") from None
    print(tasks.model_dump_json(), file=out, flush=True)

    async def play_one(play: Play) -> None:
        score = await dealer.play(play)
        played = PlayResult(version=play.version, task=play.task, seed=play.seed, score=score)
        print(played.model_dump_json(), file=out, flush=True)

    async with asyncio.TaskGroup() as plays:
        async for line in lines:
            plays.create_task(play_one(Play.model_validate_json(line)))


def main() -> None:
    settings, problem = GateSettings.model_validate_json(sys.argv[1]), ""
    try:
        asyncio.run(_on_ray(settings, _claim_standard_output()))
    except* (GateFailed, Unavailable) as group:
        problem = str(_first_leaf(group))
    sys.exit(problem or 0)


def _claim_standard_output() -> TextIO:
    """Return standard output for this program's answers, and redirect all other output to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


async def _on_ray(settings: GateSettings, answers: TextIO) -> None:
    from headrace_registry.gate_workers import on_ray

    on_ray.connect(settings.ray.address)
    dealer = PlayDispatcher(on_ray.start(settings))
    await serve(dealer, await _standard_input(), answers, _PLACED_SHARE * settings.silence_s)


async def _standard_input() -> asyncio.StreamReader:
    """Return an asynchronous reader of standard input.

    A thread would keep a failed run from ending until the registry closes the input.
    """
    reader = asyncio.StreamReader(limit=_LINE_BYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _first_leaf(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


if __name__ == "__main__":
    main()
