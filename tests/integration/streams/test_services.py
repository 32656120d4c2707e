"""The services as processes: poison on every topic, reloaded functions, and clear refusals of wrong settings."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import httpx
import pytest

from headrace_runtime.kafka.wire import Outgoing
from headrace_schemas import DeadLetter
from tests.integration.streams.rig import StreamsRig, account, episode, play, rig_on
from tests.support.broker_process import BrokerProcess
from tests.support.service_process import ServiceProcess

POISON = b'{"poison": '


@pytest.mark.timeout(180)
async def test_poison_on_every_topic_costs_nothing_else(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    choose = random.Random(seed)
    broker = BrokerProcess(tmp_path / "broker")
    broker.start()
    try:
        async with rig_on(broker.address, tmp_path) as rig:
            await rig.start()
            consumed = {
                "collector": ("turns", "feedback", "session-ends"),
                "scorer": ("trajectories", "rewards", "feedback"),
            }
            topics = {topic for names in consumed.values() for topic in names}
            await rig.producer.send_raw(
                [Outgoing(topic, b"poison", POISON, (), partition) for topic in topics for partition in range(4)]
            )
            episodes = [episode(f"{seed}-{n}", choose) for n in range(8)]
            await play(rig, episodes, choose, 0.5)
            await account(rig, episodes)
            letters = Counter((letter.service, letter.source_topic) for letter in await rig.read(DeadLetter))
            assert letters == {(service, topic): 4 for service, names in consumed.items() for topic in names}
            await _reload(rig)
            await _metrics(rig)
    finally:
        broker.stop()


async def _reload(rig: StreamsRig) -> None:
    (scorer,) = rig.processes["scorer"]
    async with httpx.AsyncClient(base_url=scorer.url, timeout=60) as http:
        before = (await http.get("/functions")).json()["functions"]
        (rig.folder / "rewards.py").write_text("def right(trajectory:\n")
        refused = await http.post("/reload")
        assert (refused.status_code, "SyntaxError" in refused.text) == (422, True)
        assert (await http.get("/functions")).json()["functions"] == before
        (rig.folder / "rewards.py").write_text("def right():\n    return 0.5\n")
        assert (await http.post("/reload")).json()["functions"][0]["digest"] != before[0]["digest"]


async def _metrics(rig: StreamsRig) -> None:
    for name, metric in {
        "collector": "headrace_collector_trajectories_total",
        "scorer": "headrace_scorer_experiences_total",
    }.items():
        async with httpx.AsyncClient(base_url=rig.processes[name][0].url) as http:
            text = (await http.get("/metrics")).text
            assert metric in text
            assert 'headrace_dead_letters_total{reason="invalid_json",topic="feedback"} 4.0' in text


def test_a_reward_function_that_cannot_be_used_stops_the_start(tmp_path: Path) -> None:
    bad = tmp_path / "rewards.py"
    bad.write_text("def score(weather): ...\n")
    scorer = ServiceProcess("scorer", tmp_path, "127.0.0.1:1", SCORER__FUNCTIONS=[f"{bad}:score"])
    scorer.start(ready=False)
    assert scorer.wait(60) == 2, "settings are wrong: a supervisor need not try again"
    assert "parameter weather; a reward function takes any of trajectory, feedback, context" in scorer.log
