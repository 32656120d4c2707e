"""The judge as a user has it: a process between a real bus and a real endpoint, killed in the middle of its calls."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import decode
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Reward
from headrace_schemas.values.base import utcnow
from tests.support import fake_llm
from tests.support.fake_llm import Call, FakeLLM, Reply
from tests.support.judge_rig import trajectory
from tests.support.processes import wait_until

ALL_S = 60.0
SPECIAL = {"refused": "failed", "prose": "parse_error", "hanging": "timed_out", "empty": "abstained"}


class JudgeProcess:
    """`python -m headrace_judge`; `kill` is SIGKILL."""

    def __init__(self, folder: Path, bus: str, llm: FakeLLM) -> None:
        names = {
            "DATA_DIR": folder,
            "BUS__ADDRESS": bus,
            "JUDGE__PORT": 0,
            "JUDGE__LEASE_S": 1.0,
            "JUDGE__ENDPOINT__BASE_URL": llm.base_url,
            "JUDGE__ENDPOINT__MODEL": "judge-1",
            "JUDGE__ENDPOINT__CONCURRENCY": 4,
            "JUDGE__ENDPOINT__TIMEOUT_S": 0.5,
            "JUDGE__RETRY__TIMEOUTS_MAX": 1,
        }
        self._environ = os.environ | {f"HEADRACE_{name}": str(value) for name, value in names.items()}
        self.log = folder / "judge.log"
        folder.mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "headrace_judge"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=self._environ)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        self._process.terminate()
        return self._process.wait(20)


def behave(call: Call) -> Reply:
    """Answer slowly enough to be killed, and wrongly where the prompt requests it."""
    answers = {
        "refused": fake_llm.status(400),
        "prose": fake_llm.prose(),
        "hanging": fake_llm.hang(),
        "empty": fake_llm.abstain(),
    }
    match = re.search(r"special (\w+)", call.prompt)
    if match:
        return answers[match[1]](call)
    time.sleep(0.05)
    number = re.search(r"answer (\d+)", call.prompt)
    score = 1 + int(number[1]) % 5 if number else 3  # the bus is shared with other tests
    return fake_llm.verdict(outcome=score, grounding=score, conduct=score, clarity=score)(call)


async def publish(settings: BusSettings, blobs: BlobStore, names: dict[str, str]) -> None:
    producer = EventProducer(settings, "headrace/test", blobs)
    await producer.start()
    try:
        for name, answer in names.items():
            await producer.send(trajectory(name, answer=answer, time=utcnow()))
    finally:
        await producer.stop()


async def rewards_for(settings: BusSettings, blobs: BlobStore, names: set[str]) -> dict[str, list[Reward]]:
    """Return all rewards of these trajectories once each has one and no more arrive."""
    reader = consumer(settings, "test-rewards")
    await reader.start()
    rewards: dict[str, list[Reward]] = defaultdict(list)
    deadline = time.monotonic() + ALL_S
    try:
        await reader.seek_to_beginning(*await assign_all(reader, "rewards"))
        quiet = 0
        while quiet < 3:
            assert time.monotonic() < deadline, f"no reward for {sorted(names - set(rewards))}"
            batches = await reader.getmany(timeout_ms=200)
            for message in (message for batch in batches.values() for message in batch):
                event = (await decode(record_of(message), blobs)).event
                if isinstance(event, Reward) and event.trajectory_id in names and event.source == "judge:helpfulness":
                    rewards[event.trajectory_id].append(event)
            quiet = quiet + 1 if not batches and set(rewards) == names else 0
    finally:
        await reader.stop()
    return rewards


@pytest.mark.long
async def test_kill_9_in_the_middle_of_calls_loses_and_doubles_nothing(embedded_bus: str, tmp_path: Path) -> None:
    settings = BusSettings(address=embedded_bus)
    blobs = BlobStore((tmp_path / "blobs").as_uri())
    await topics.ensure(settings)
    plain = {f"killed-{n}": f"answer {n}" for n in range(40)}
    special = {f"killed-{name}": f"special {name}" for name in SPECIAL}
    with FakeLLM(behave) as llm:
        await publish(settings, blobs, plain | special)
        judge = JudgeProcess(tmp_path / "data", embedded_bus, llm)
        try:
            for calls in (8, 24):
                wait_until(lambda calls=calls: len(llm.calls) >= calls, ALL_S, f"{calls} calls")  # type: ignore[misc]
                judge.kill()
                judge.start()
            late = {"killed-late": "answer 99"}
            await publish(settings, blobs, late)
            rewards_of = await rewards_for(settings, blobs, {*plain, *special, *late})
        finally:
            status = judge.stop()
    assert status == 0, judge.log.read_text()[-2000:]
    assert {
        name: len({reward.event_id for reward in rewards}) for name, rewards in rewards_of.items()
    } == dict.fromkeys({*plain, *special, *late}, 1)
    for name, answer in (plain | late).items():
        assert {reward.value for reward in rewards_of[name]} == {int(answer.split()[1]) % 5 / 4}
    assert {name: rewards_of[f"killed-{name}"][0].outcome for name in SPECIAL} == SPECIAL
    logged = [json.loads(line) for line in judge.log.read_text().splitlines() if line.startswith("{")]
    assert any(line["event"] == "listening" for line in logged)
    assert "answer 1" not in judge.log.read_text(), "the log quotes a run"
