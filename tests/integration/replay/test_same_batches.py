"""Tests of replays on a real bus: a replay of a live lineage repeats its batches byte for byte (P9).

No live service is disturbed. With another reward, judge or algorithm, a replay is planned, run, or refused with a
remedy. The live system is a broker, a trainer, and consumer groups with uncommitted records.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from aiokafka import AIOKafkaConsumer, TopicPartition
from safetensors.numpy import load

from headrace.topics import Range, connected
from headrace_runtime.clock import SystemClock
from headrace_runtime.kafka import topics as catalogue
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.records import Records
from headrace_schemas import Checkpoint, Event, Experience, Feedback, Span, TrainingMetrics, Trajectory
from headrace_schemas.values.base import utcnow
from headrace_schemas.values.ids import session_key
from headrace_trainer.learner import WEIGHTS
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.lineage.saved import SavedState
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.settings import TrainerSettings
from tests.integration.conftest import TrainerProcess
from tests.support import tiny_model
from tests.support.fake_llm import FakeLLM, verdict
from tests.support.presence import draw_seed
from tests.support.turns import ask, closed, user
from tests.support.wire_client import administering
from tests.unit.trainer.world import experience

LIVE = ("headrace-collector", "headrace-scorer", "headrace-judge")
WAIT_S = 120.0
Offsets = dict[tuple[str, str, int], int]


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build(tmp_path_factory.mktemp("replay") / "base", layers=1)


@pytest.fixture
def own_bus(request: pytest.FixtureRequest) -> str:
    """Return the address of an embedded broker for this test, or of the shared Kafka if the parameter is `kafka`."""
    kind = getattr(request, "param", "embedded")
    return str(request.getfixturevalue("kafka_bus" if kind == "kafka" else "empty_bus"))


@dataclass
class ReplayRig:
    """Live system. `send` publishes events, and `headrace` runs the command as a user does."""

    bus: str
    data_dir: Path
    base: Path
    producer: EventProducer
    model: str
    settings: dict[str, object]

    async def send(self, *events: Event) -> None:
        for event in events:
            await self.producer.send(event)

    async def read(self, kind: type[Event], topic: str | None = None) -> list[Any]:
        """Return the events of class `kind` on its topic, or on the copy `topic`, without duplicates."""
        events: dict[str, Event] = {}
        async with connected(self.bus) as topics:
            async for record in topics.records(Range(topic or kind.topic)):
                event = kind.from_json(record.value)
                events[event.event_id] = event
        return list(events.values())

    async def until(self, label: str, condition: Callable[[list[Any]], object], kind: type[Event]) -> list[Any]:
        """Wait until `condition` holds for the events of class `kind`, and return them."""
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while not condition(events := await self.read(kind)):
            assert asyncio.get_running_loop().time() < deadline, f"{label}: not after {WAIT_S} s; {events[-3:]}"
            await asyncio.sleep(0.2)
        return events

    async def headrace(self, *arguments: str, status: int = 0) -> str:
        """Return the output of `headrace replay ...`; its standard error is in the failure message."""
        program = "from headrace_cli.app import main; main()"
        settings = {"trainer.base": self.base, "bus.address": self.bus, "data_dir": self.data_dir}
        settings |= {"trainer.steps_per_version": 1, "trainer.max_staleness": 4, **self.settings}
        environ = {f"HEADRACE_{name.upper().replace('.', '__')}": str(value) for name, value in settings.items()}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, "replay", *arguments, env={**os.environ, **environ, "COLUMNS": "200"},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        out, error = await process.communicate()
        assert process.returncode == status, f"status {process.returncode}\n{out.decode()}\n{error.decode()}"
        return out.decode() + (error.decode() if status else "")

    async def report(self, *arguments: str) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(await self.headrace(*arguments, "--json"))
        return report

    async def take_part(self, group: str, topic: str, records: int) -> None:
        """Join a live group, read and commit up to `records` records, and leave."""
        options: dict[str, Any] = {"group_id": group, "enable_auto_commit": False, "auto_offset_reset": "earliest"}
        reader = AIOKafkaConsumer(topic, bootstrap_servers=self.bus, **options)
        await reader.start()
        try:
            await reader.getmany(timeout_ms=20_000, max_records=records)
            await reader.commit()
        finally:
            await reader.stop()

    async def live_state(self) -> tuple[Offsets, dict[str, dict[int, int]], set[str]]:
        """Return the committed offsets of the live groups, the ends of the live topics, and the names of all groups."""
        async with administering(self.bus) as admin:
            committed: Offsets = {}
            for group in LIVE:
                for partition, metadata in (await admin.list_consumer_group_offsets(group)).items():
                    assert isinstance(partition, TopicPartition)
                    committed[group, partition.topic, partition.partition] = metadata.offset
            groups = {name for name, *_ in await admin.list_consumer_groups()}
        async with connected(self.bus) as topics:
            return committed, await topics.ends(sorted(catalogue.catalogue())), groups


@pytest.fixture
async def rig(own_bus: str, base: Path, tmp_path: Path) -> AsyncIterator[ReplayRig]:
    settings = BusSettings(address=own_bus)
    await catalogue.ensure(settings)
    data_dir = tmp_path / "data"
    producer = EventProducer(settings, "test", BlobStore((data_dir / "blobs").as_uri()))
    await producer.start()
    model = f"m-{uuid.uuid4().hex[:8]}"
    yield ReplayRig(own_bus, data_dir, base, producer, model, {"trainer.model": model})
    await producer.stop()


@pytest.fixture
def live_trainer(rig: ReplayRig, tmp_path: Path) -> Iterator[TrainerProcess]:
    """Yield a trainer that cuts batches by number or by time, as replays with equal settings do."""
    batches = {"BATCH_EXPERIENCES": 8, "BATCH_EXPERIENCES_MIN": 1, "BATCH_WAIT_S": 1.0, "SAVE_INTERVAL_S": 0.2}
    trainer_settings = {"MODEL": rig.model, "MAX_STALENESS": 2, **batches}
    process = TrainerProcess(tmp_path, rig.bus, rig.base, **trainer_settings)
    rig.settings |= {f"trainer.{name.lower()}": str(value) for name, value in trainer_settings.items()}
    process.begin()
    yield process
    process.kill()


pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
Report = dict[str, Any]


async def replay_all(rig: ReplayRig, lineage: str, _plan: Report) -> Report:
    """Run the replay without interruption, and return its report."""
    return await rig.report("run", lineage)


def same_training(report: Report, plan: Report) -> None:
    for name in ("batches", "trained", "dropped"):
        assert report["training"][name] == plan["training"][name]


async def interrupted(rig: ReplayRig, lineage: str, plan: Report) -> Report:
    """Stop the replay after two steps, resume it, and return its report."""
    begun = await rig.report("run", lineage, "--set", "trainer.max_steps=2")
    assert begun["training"]["batches"] == plan["training"]["batches"][:2]
    assert (begun["same"], begun["batches_equal"]) == (False, 2)
    return await rig.report("resume", lineage)


@pytest.mark.parametrize(
    ("own_bus", "replay"),
    [("embedded", interrupted), pytest.param("kafka", replay_all, marks=pytest.mark.kafka)],
    indirect=["own_bus"],
)
async def test_p9_a_replay_repeats_the_batches_and_disturbs_nobody(
    rig: ReplayRig, live_trainer: TrainerProcess, replay: Callable[[ReplayRig, str, Report], Awaitable[Report]]
) -> None:
    seed = draw_seed()
    sent = await live(rig, random.Random(seed))
    accounts = await verdicts_on(rig, len(sent))
    again = f"again-{rig.model}"
    digests = [batch.digest for account in accounts for batch in account.batches]
    sizes = {batch.experiences for account in accounts for batch in account.batches}
    assert len(sizes) > 1, "time has cut some of the batches"
    assert len({read.partition for one in accounts for batch in one.batches for read in batch.read}) > 1
    await someone_listens(rig)
    before = await rig.live_state()
    assert {group for (group, _, _), offset in before[0].items() if offset} == set(LIVE), "they have work behind them"
    pointer = Records(BlobStore((rig.data_dir / "blobs").as_uri()), "lineages/main").newest()
    plan = await rig.report("plan")
    assert plan["cut"] == "recorded", plan["cut_because"]
    assert [batch["digest"] for batch in plan["training"]["batches"]] == digests
    assert plan["same"]
    reasons = Counter(reason for _, reason in fates(accounts))
    assert plan["training"]["trained"] == reasons.pop(None)
    assert plan["training"]["dropped"] == reasons
    assert await rig.live_state() == before, "a plan writes nothing"
    report = await replay(rig, again, plan)
    assert report["same"]
    same_training(report, plan)
    reported = await rig.read(TrainingMetrics, f"replay-{again}-training-metrics")
    assert [batch.digest for account in reported for batch in account.batches] == digests
    assert await rig.live_state() == before, "live topics, groups, offsets and lags are as they were"
    assert Records(BlobStore((rig.data_dir / "blobs").as_uri()), "lineages/main").newest() == pointer
    assert live_trainer.running(), "the live trainer has gone on"
    same_weights(rig, again)
    await offered(rig, again, report["version"])


E = TypeVar("E", Checkpoint, TrainingMetrics)


async def live(rig: ReplayRig, draw: random.Random) -> list[Experience]:
    """Send bursts of experiences of the newest and the oldest version, some with a revision, and return them."""
    (first,) = of_rig(await rig.until("the base version", lambda events: of_rig(events, rig), Checkpoint), rig)
    alone = experience(999, first.version, draw.random(), task="t0", run="alone", model=rig.model)
    sent: list[Experience] = [alone]  # a batch of its own, compared with nothing: a step that changes nothing
    await rig.send(alone)
    await verdicts_on(rig, 1)
    for burst in range(5):
        newest = max(of_rig(await rig.read(Checkpoint), rig), key=lambda checkpoint: checkpoint.step).version
        turns_sent = []
        for number in range(20 * burst, 20 * burst + draw.randint(3, 13)):
            version = first.version if number % 7 == 6 else newest
            task, name = f"t{number % 3}", str(number)
            turns_sent.append(experience(number, version, draw.random(), task=task, run=name, model=rig.model))
            if number % 5 == 3:
                turns_sent.append(turns_sent[-1].model_copy(update={"revision": 1, "reward": -1.0}))
        await rig.send(*turns_sent)
        sent += turns_sent
        await verdicts_on(rig, len(sent))
    return sent


async def verdicts_on(rig: ReplayRig, count: int) -> list[TrainingMetrics]:
    accounts = await rig.until(
        f"{count} verdicts", lambda accounts: len(fates(of_rig(accounts, rig))) >= count, TrainingMetrics
    )
    return of_rig(accounts, rig)


async def someone_listens(rig: ReplayRig) -> None:
    """Let the live groups read and commit some of their records."""
    runs = [closed(ask([user(str(number))], session=f"s{number}")) for number in range(12)]
    words = [
        Feedback(time=utcnow(), feedback_id=f"f{number}", session_key=session_key("default", f"s{number}"), value=1.0)
        for number in range(12)
    ]
    await rig.send(*runs, *words)
    for group, topic in zip(LIVE, (Feedback.topic, Trajectory.topic, Trajectory.topic), strict=True):
        await rig.take_part(group, topic, 5)


def same_weights(rig: ReplayRig, lineage: str) -> None:
    """Check that equal batches gave bitwise equal weights. Only the names of the versions differ."""
    blobs = BlobStore((rig.data_dir / "blobs").as_uri())
    stores = [LineageStore(blobs, name) for name in ("main", lineage)]
    live, again = (saved for store in stores if (saved := store.read()))
    assert live.steps == again.steps > 0
    assert live.head != again.head
    live_weights, replayed_weights = map(_weights, stores, (live, again))
    assert live_weights.keys() == replayed_weights.keys()
    assert all(np.array_equal(tensor, replayed_weights[name]) for name, tensor in live_weights.items())


def _weights(store: LineageStore, saved: SavedState) -> dict[str, np.ndarray[Any, Any]]:
    with store.open_tensors(saved.present) as folder:
        return load((folder / WEIGHTS).read_bytes())


async def offered(rig: ReplayRig, lineage: str, version: str) -> None:
    """Check that only `offer` publishes the replayed version, and that `remove` deletes the replay and its topics."""
    assert version not in [checkpoint.version for checkpoint in await rig.read(Checkpoint)]
    assert lineage in (await rig.headrace("list")).split()
    refused = await rig.headrace("run", lineage, status=2)
    assert f"there was a replay into lineage '{lineage}' already" in refused
    assert f"headrace replay resume {lineage}" in refused
    await rig.headrace("offer", lineage)
    (announced,) = (checkpoint for checkpoint in await rig.read(Checkpoint) if checkpoint.version == version)
    assert announced.lineage == lineage
    await rig.headrace("remove", lineage)
    assert lineage not in (await rig.headrace("list")).split()


def of_rig(events: list[E], rig: ReplayRig) -> list[E]:
    """Return the events of this test's model, because tests share Kafka."""
    return [event for event in events if event.model == rig.model]


def fates(accounts: list[TrainingMetrics]) -> list[tuple[tuple[str, int], str | None]]:
    verdicts = [verdict for account in accounts for verdict in account.verdicts]
    return [((verdict.experience_id, verdict.revision), verdict.dropped) for verdict in verdicts]


REWARDS = """
def strict(trajectory, context):
    number = int(trajectory.session_id.removeprefix("s"))
    if number % 8 == 7:
        return None
    return float(number % 3) + context.get("bonus", 0)
"""
COUNT = 22


def lineage(rig: ReplayRig) -> str:
    """Open the live lineage, and return the version of its base."""
    blobs = BlobStore((rig.data_dir / "blobs").as_uri())
    return open_lineage(TrainerSettings(base=str(rig.base), model=rig.model), blobs, SystemClock()).saved.head


def run(model: str, number: int, version: str, **fields: Any) -> Trajectory:
    """Return a trajectory with one turn in the session `s<number>`. Every fourth run has the same task."""
    trajectory = closed(ask([user(f"question {number}")], session=f"s{number}"), at=float(number))
    (branch,) = trajectory.branches
    spans = tuple(Span.model_validate({**dict(span), "version": version}) for span in branch.spans)
    event_fields = {"model": model, "task_id": f"t{number % 4}", "run_id": str(number), **fields}
    return trajectory.model_copy(update={"branches": (branch.model_copy(update={"spans": spans}),), **event_fields})


@pytest.fixture
async def version(rig: ReplayRig, tmp_path: Path) -> str:
    """Send trajectories of the base version, one of them held out, and feedback that gives one a bonus."""
    (tmp_path / "rewards.py").write_text(REWARDS, encoding="utf-8")
    version = lineage(rig)
    runs = [run(rig.model, number, version) for number in range(COUNT)]
    word = Feedback(
        time=utcnow(), feedback_id="f", session_key=runs[1].session_key, msg_ids=runs[1].turn_ids, context={"bonus": 7}
    )
    others = run(rig.model, COUNT, version, purpose="eval"), run(rig.model, COUNT + 1, "other@0123456789ab")
    await rig.send(*runs, *others, word)
    rig.settings |= {"trainer.batch_experiences": 4, "trainer.batch_experiences_min": 2}
    return version


async def test_another_reward(rig: ReplayRig, version: str, tmp_path: Path) -> None:
    rewards = ["--rewards", f"{tmp_path / 'rewards.py'}:strict"]
    plan = await rig.report("plan", *rewards)
    assert plan["selected"] == COUNT + 2
    assert plan["versions"] == {version: COUNT + 1, "other@0123456789ab": 1}
    assert plan["scored"]["outcomes"] == {"function:strict": {"abstained": 3, "scored": COUNT - 2}}
    assert plan["scored"]["not_trained"] == {"eval": 1}
    assert plan["kinds"] == {"no_reward": 3, "rewarded": COUNT - 2}
    training = plan["training"]
    assert training["dropped"]["no_reward"] == 3
    assert training["trained"] + sum(training["dropped"].values()) + training["waiting"] == COUNT + 1
    assert (plan["cut"], plan["cut_because"]) == ("rules", "the rewards are computed again")
    report = await rig.report("run", "strict", *rewards)
    same_training(report, plan)
    assert report["version"].startswith(f"{rig.model}@")
    copied = {event.session_id: event for event in await rig.read(Experience, "replay-strict-experiences")}
    assert copied["s1"].reward == 8.0, "the bonus came with feedback"
    assert copied["s2"].reward == 2.0
    assert copied["s7"].no_reward == "no_reward", "P6: abstaining is no zero"
    assert f"s{COUNT}" not in copied, "what is held out is not trained"
    group = ("--algorithm", "grpo", "--set", "trainer.group_size=2")
    grouped = await rig.report("plan", *rewards, *group, "--version", version)
    assert grouped["selected"] == COUNT + 1
    assert grouped["training"]["batches"] != plan["training"]["batches"]
    assert "foreign_version" not in grouped["training"]["dropped"]


async def test_another_judge(rig: ReplayRig, version: str) -> None:
    with FakeLLM(verdict(outcome=5, grounding=5, conduct=5, clarity=5)) as llm:
        rig.settings |= {"judge.endpoint.base_url": llm.base_url, "judge.endpoint.model": "judge-2"}
        plan = await rig.report("plan", "--judge", "--version", version)
        calls = len(llm.calls)
        again = await rig.report("plan", "--judge", "--version", version)
        assert len(llm.calls) == calls, "verdicts are not paid for twice"
    assert plan == again
    assert plan["judged"]["outcomes"] == {"judge:helpfulness": {"scored": COUNT}}
    assert plan["kinds"] == {"rewarded": COUNT}


async def test_refusals_leave_nothing_behind(rig: ReplayRig, version: str, tmp_path: Path) -> None:
    wrong = await rig.headrace("run", "broken", "--rewards", f"{tmp_path / 'rewards.py'}:missing", status=2)
    assert "scorer: setting scorer.functions" in wrong
    assert "missing" in wrong
    assert (await rig.headrace("list")).split() == []
    unknown = await rig.headrace("plan", "--of", "nobody", "--rescore", status=2)
    assert "trainer.replays = 'nobody': no such lineage" in unknown
    rescored = await rig.headrace("plan", "--rescore", "--cut", "recorded", status=2)
    assert "--cut recorded: the rewards are computed again" in rescored
    assert "has no complete copy of the replay" in await rig.headrace("resume", "broken", status=2)
    assert "lineage = 'main': is the live lineage" in await rig.headrace("run", "main", status=2)
