"""kill -9 in the middle: every turn is in one trajectory, every trajectory has one experience, without doubles."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.integration.streams.rig import StreamsRig, account, episode, play


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_nothing_is_lost_or_doubled_when_services_are_killed(rig: StreamsRig) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    choose = random.Random(seed)
    episodes = [episode(f"{seed}-{n}", choose, shared=f"{seed}" if n % 5 == 0 else None) for n in range(40)]
    await rig.start()
    playing = asyncio.create_task(play(rig, episodes, choose, 4.0))
    for _ in range(2):
        for name in ("collector", "scorer"):
            await asyncio.sleep(0.3 + choose.random())
            victim = choose.choice(rig.processes[name])
            victim.kill()
            victim.start(ready=False)
    await playing
    await account(rig, episodes)
    assert set(rig.stop()) == {0}, "and they end cleanly when asked to"
