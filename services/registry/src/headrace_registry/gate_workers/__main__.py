"""`python -m headrace_registry.gate_workers SETTINGS`: a gate's program (`headrace_schemas.gate`) that has others play.
SETTINGS are `[registry.gate]` as JSON."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterable
from typing import TextIO

from headrace_registry.gate import GateFailed
from headrace_registry.gate_workers.dealing import Dealer, WorkerLost
from headrace_registry.settings import GateSettings
from headrace_runtime.errors import Unavailable
from headrace_schemas.gate import Play, Played

_PLACED_SHARE = 0.8
"""Of `silence_s`: said before the registry finds us silent."""
_LINE_BYTES_MAX = 1_048_576
"""A play names one task."""


async def serve(dealer: Dealer, lines: AsyncIterable[str | bytes], out: TextIO, start_s: float) -> None:
    """Until `lines` end. Raises `GateFailed`, in a group, with the first play that has no score."""
    try:
        async with asyncio.timeout(start_s):
            named = await dealer.tasks()
    except TimeoutError:
        raise GateFailed(f"Ray has not started all workers within {start_s:g} s; has the cluster room?") from None
    except WorkerLost as error:
        raise GateFailed(f"a worker was lost before it had named its tasks: {error}") from None
    print(named.model_dump_json(), file=out, flush=True)

    async def one(play: Play) -> None:
        score = await dealer.play(play)
        told = Played(version=play.version, task=play.task, seed=play.seed, score=score)
        print(told.model_dump_json(), file=out, flush=True)

    async with asyncio.TaskGroup() as plays:
        async for line in lines:
            plays.create_task(one(Play.model_validate_json(line)))


def main() -> None:
    settings, problem = GateSettings.model_validate_json(sys.argv[1]), ""
    try:
        asyncio.run(_on_ray(settings, _answers_alone()))
    except* (GateFailed, Unavailable) as group:
        problem = str(_first(group))
    sys.exit(problem or 0)


def _answers_alone() -> TextIO:
    """Standard output, for our answers; what Ray and logs print there goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


async def _on_ray(settings: GateSettings, answers: TextIO) -> None:
    from headrace_registry.gate_workers import on_ray

    on_ray.connect(settings.ray.address)
    dealer = Dealer(on_ray.start(settings))
    await serve(dealer, await _standard_input(), answers, _PLACED_SHARE * settings.silence_s)


async def _standard_input() -> asyncio.StreamReader:
    """Not by a thread, which would keep a failed run from ending until the registry closes our input."""
    reader = asyncio.StreamReader(limit=_LINE_BYTES_MAX)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    return reader


def _first(group: BaseException) -> BaseException:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    return group


if __name__ == "__main__":
    main()
