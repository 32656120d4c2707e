"""Tests of the judge on both databases, alone, as two replicas, and as a process that is killed during its calls."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections import defaultdict
from datetime import timedelta
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, select

from headrace_judge.call_budget import BudgetLimit, CallBudget, Reservation
from headrace_judge.settings import BudgetSettings
from headrace_judge.tables import METADATA, STREAM
from headrace_runtime.clock import epoch_ms
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import decode
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Reward, Trajectory
from headrace_schemas.values.base import utcnow
from tests.support import fake_llm
from tests.support.fake_llm import Call, FakeLLM, Reply
from tests.support.processes import wait_until
from tests.support.streams import Rig, judge, replica, settings, trajectory
from tests.support.turns import START
from tests.unit.judge.conftest import _eager, llm

PREFERENCE = (
    'name = "preference"\nmode = "pair"\ninstructions = "Which is better?"\n'
    '[[criteria]]\nname = "better"\ndescription = "The better one."\n'
)
__all__ = ["_eager", "llm"]


def by_number(call: Call) -> str:
    if "Run B" not in call.last:
        return json.dumps({"reason": "", "criteria": {"outcome": 5, "grounding": 5, "conduct": 5, "clarity": 5}})
    first, second = (int(number) for number in re.findall(r"answer (\d+)", call.last))
    return json.dumps({"reason": "", "criteria": {"better": "A" if first > second else "B"}})


def run(number: int) -> Trajectory:
    return trajectory(f"run-{number}", answer=f"answer {number}", task_id="task", run_id=str(number))


def differences(connection: Connection) -> list[object]:
    return list(compare_metadata(MigrationContext.configure(connection), METADATA))


async def test_the_migrations_make_the_tables_that_the_code_uses(
    llm: FakeLLM, data_dir: Path, database_url: str
) -> None:
    async with judge(settings(llm), data_dir, database_url) as rig, rig.bench.processor.database.transaction() as tx:
        differing = await tx.run_sync(differences)
    assert [item for item in differing if "schema_version" not in str(item)] == []


async def test_single_and_pair_side_by_side(llm: FakeLLM, data_dir: Path, database_url: str, tmp_path: Path) -> None:
    path = tmp_path / "preference.toml"
    path.write_text(PREFERENCE)
    llm.usual = fake_llm.answer(by_number)
    judge_settings = settings(llm, rubrics=["helpfulness", str(path)], pairs={"wait_s": 60.0, "window_s": 120.0})
    async with judge(judge_settings, data_dir, database_url) as rig:
        await rig.bench.deliver(run(1), run(2), trajectory("alone", task_id="other", run_id="x"))
        await rig.judged(3 + 2)
        await rig.tick(61.0)
        await rig.judged(6)
        outcomes = {(r.source, r.trajectory_id): (r.outcome, r.value, r.revision) for r in rig.rewards}
        await rig.tick(60.0)
        tables = ("contests", "contestants", "pairs", "jobs", "outbox")
        assert [await rig.bench.count(table) for table in tables] == [0] * len(tables)
    assert outcomes == {
        ("judge:helpfulness", "run-1"): ("scored", 1.0, 0),
        ("judge:helpfulness", "run-2"): ("scored", 1.0, 0),
        ("judge:helpfulness", "alone"): ("scored", 1.0, 0),
        ("judge:preference", "run-1"): ("scored", 0.0, 0),
        ("judge:preference", "run-2"): ("scored", 1.0, 0),
        ("judge:preference", "alone"): ("abstained", None, 0),
    }


async def test_two_replicas_make_every_pair_once_and_count_revisions_together(
    llm: FakeLLM, data_dir: Path, database_url: str, tmp_path: Path
) -> None:
    """Runs of one task come through different partitions, so two replicas compare them at the same time."""
    path = tmp_path / "preference.toml"
    path.write_text(PREFERENCE)
    llm.usual = fake_llm.answer(by_number)
    judge_settings = settings(llm, rubrics=[str(path)])
    async with (
        judge(judge_settings, data_dir, database_url) as first,
        replica(first, judge_settings, data_dir, database_url) as other,
    ):
        await asyncio.gather(*(rig.bench.deliver(run(n)) for n in range(6) for rig in [(first, other)[n % 2]]))
        await first.until(lambda: len(first.rewards) + len(other.rewards) == 6 * 5, "five revisions of six runs")
        assert await first.bench.count("pairs") == 15
        rewards = [*first.rewards, *other.rewards]
        assert first.rewards
        assert other.rewards
    by_run: dict[str, list[Reward]] = defaultdict(list)
    for reward in rewards:
        by_run[reward.trajectory_id].append(reward)
    for number in range(6):
        of_run = sorted(by_run[f"run-{number}"], key=lambda reward: reward.revision)
        assert [reward.revision for reward in of_run] == list(range(5))
        assert of_run[-1].value == number / 5


async def test_two_replicas_never_spend_more_than_the_budget(llm: FakeLLM, data_dir: Path, database_url: str) -> None:
    llm.usual = fake_llm.answer(by_number)
    judge_settings = settings(llm, budget={"calls_per_hour": 7}, endpoint={"concurrency": 8})
    async with (
        judge(judge_settings, data_dir, database_url) as first,
        replica(first, judge_settings, data_dir, database_url) as other,
    ):
        for number, rig in enumerate([first, other] * 8):
            await rig.bench.deliver(run(number))
        await first.until(lambda: len(first.rewards) + len(other.rewards) == 16)
        outcomes = [reward.outcome for reward in [*first.rewards, *other.rewards]]
    assert len(llm.calls) == 7
    assert (outcomes.count("scored"), outcomes.count("abstained")) == (7, 9)


async def test_one_replica_waits_until_another_has_counted_its_call(
    llm: FakeLLM, data_dir: Path, database_url: str
) -> None:
    judge_settings = settings(llm)
    budget = CallBudget(BudgetSettings(calls_per_day=2))
    async with (
        judge(judge_settings, data_dir, database_url) as first,
        replica(first, judge_settings, data_dir, database_url) as other,
    ):
        await first.stop()
        await other.stop()

        async def reserve(rig: Rig) -> Reservation | BudgetLimit:
            async with rig.bench.processor.database.transaction() as tx:
                return await budget.reserve(tx, START, 1)

        assert isinstance(await reserve(first), Reservation)
        async with first.bench.processor.database.transaction() as tx:
            assert isinstance(await budget.reserve(tx, START, 1), Reservation)
            second = asyncio.ensure_future(reserve(other))
            _, waiting = await asyncio.wait([second], timeout=0.2)
            assert waiting
        assert await second == BudgetLimit("calls_per_day", 2)
        first.start()
        other.start()


async def test_a_result_that_comes_after_the_lease_is_discarded(
    llm: FakeLLM, data_dir: Path, database_url: str
) -> None:
    """Two replicas judged one trajectory with different results. Only one of them publishes its result."""
    late = threading.Event()

    def slow(call: Call) -> Reply:
        late.wait(20)
        return fake_llm.verdict(outcome=1, grounding=1, conduct=1, clarity=1)(call)

    llm.then(slow)
    judge_settings = settings(llm, endpoint={"timeout_s": 20.0})
    async with (
        judge(judge_settings, data_dir, database_url) as first,
        replica(first, judge_settings, data_dir, database_url) as other,
    ):
        await other.stop()
        await first.bench.deliver(run(1))
        await first.until(lambda: len(llm.calls) == 1)
        other.bench.clock.advance(31.0)
        other.start()
        await other.judged()
        late.set()
        await first.idle()
        assert first.rewards == []
        assert [reward.value for reward in other.rewards] == [0.75]


async def test_the_lease_of_work_in_progress_is_renewed(llm: FakeLLM, data_dir: Path, database_url: str) -> None:
    llm.usual = fake_llm.hang()
    judge_settings = settings(llm, lease_s=1.0, endpoint={"timeout_s": 20.0})
    async with judge(judge_settings, data_dir, database_url) as rig:

        async def renewed() -> bool:
            async with rig.bench.processor.database.transaction() as tx:
                due_ms: int = (await tx.execute(select(STREAM.jobs.c.due_ms))).scalar_one()
            return due_ms == epoch_ms(rig.bench.clock.now() + timedelta(seconds=1))

        await rig.bench.deliver(run(1))
        await rig.until(lambda: len(llm.calls) == 1)
        for _ in range(2):
            rig.bench.clock.advance(0.9)
            for _ in range(200):
                if await renewed():
                    break
                await asyncio.sleep(0.05)
            else:
                pytest.fail("the lease was not renewed")
        assert len(llm.calls) == 1


ALL_S = 60.0
SPECIAL = {"refused": "failed", "prose": "parse_error", "hanging": "timed_out", "empty": "abstained"}


class JudgeProcess:
    """Process of `python -m headrace_judge`. `kill` sends SIGKILL."""

    def __init__(self, folder: Path, bus: str, llm: FakeLLM) -> None:
        names = {
            "DATA_DIR": folder, "BUS__ADDRESS": bus, "JUDGE__PORT": 0, "JUDGE__LEASE_S": 1.0,
            "JUDGE__ENDPOINT__BASE_URL": llm.base_url, "JUDGE__ENDPOINT__MODEL": "judge-1",
            "JUDGE__ENDPOINT__CONCURRENCY": 4, "JUDGE__ENDPOINT__TIMEOUT_S": 0.5,
        }  # fmt: skip
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
    """Answer slowly enough to be killed meanwhile, and with a wrong verdict where the prompt requests it."""
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
    """Wait until each trajectory in `names` has a reward and no more arrive. Return all rewards by trajectory."""
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
