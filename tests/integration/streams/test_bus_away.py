"""The bus dies and comes back: the services wait or are restarted, and no event is lost."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from tests.integration.streams.rig import account, episode, play, rig_on
from tests.support.broker_process import BrokerProcess


@pytest.mark.long
@pytest.mark.timeout(240)
async def test_nothing_is_lost_when_the_bus_is_killed(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    choose = random.Random(seed)
    broker = BrokerProcess(tmp_path / "broker")
    broker.start()
    try:
        async with rig_on(broker.address, tmp_path) as rig:
            await rig.start()
            supervisor = asyncio.create_task(rig.supervise())
            episodes = [episode(f"{seed}-{n}", choose) for n in range(15)]
            playing = asyncio.create_task(play(rig, episodes, choose, 3.0))
            for _ in range(2):
                await asyncio.sleep(0.5 + choose.random())
                broker.kill()
                await asyncio.sleep(choose.random())
                await asyncio.to_thread(broker.start)
            await playing
            await account(rig, episodes)
            supervisor.cancel()
    finally:
        broker.stop()
