"""`python -m headrace_registry.gate_workers SETTINGS`: a gate's program (`headrace_schemas.gate`) that has others play.
SETTINGS are `[registry.gate]` as JSON."""

from __future__ import annotations

import asyncio
import sys
from typing import TextIO

from headrace_registry.gate import GateFailed
from headrace_registry.gate_workers.dealing import Dealer, WorkerLost
from headrace_registry.settings import GateSettings
from headrace_runtime.errors import Unavailable
from headrace_schemas.gate import Play, Played

_PLACED_SHARE = 0.8
"""Of `silence_s`: said before the registry finds us silent."""


async def serve(dealer: Dealer, lines: TextIO, out: TextIO, start_s: float) -> None:
    """Until `lines` end. Raises `GateFailed` with the first play that has no score."""
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
        while line := await asyncio.to_thread(lines.readline):
            plays.create_task(one(Play.model_validate_json(line)))


def main() -> None:
    settings = GateSettings.model_validate_json(sys.argv[1])
    try:
        from headrace_registry.gate_workers import on_ray

        on_ray.connect(settings.ray.address)
        asyncio.run(_on_ray(settings))
    except* (GateFailed, Unavailable) as group:
        sys.exit(str(_first(group)))


async def _on_ray(settings: GateSettings) -> None:
    from headrace_registry.gate_workers import on_ray

    dealer = Dealer(on_ray.start(settings))
    await serve(dealer, sys.stdin, sys.stdout, _PLACED_SHARE * settings.silence_s)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


if __name__ == "__main__":
    main()
