"""Tests that recorded reads reproduce a trainer's batches byte for byte in any process (P9), also if they were cut
by time."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from headrace_runtime.errors import SettingError
from headrace_schemas import Experience, PartitionRead, TrainingMetrics
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.programs import BATCH_HEADER, DryRunLine, recorded_batches
from headrace_trainer.learner import NotFinite, StepResult
from headrace_trainer.replay import DryRun
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner import learner as learners
from headrace_trainer.torch_learner.step import train
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import Bus, World, experience, policy_of

Marked = tuple[Experience, tuple[int, ...]]


async def live(folder: Path, settings: TrainerSettings) -> World:
    """Run a lineage whose batches are hard to reproduce: two partitions, time, revisions, redeliveries and stale
    experiences."""
    world = World(folder)
    await world.run(settings)
    for round_ in range(4):
        newest, oldest = world.bus.checkpoints[-1].version, world.bus.checkpoints[0].version
        numbers = range(10 * round_, 10 * round_ + 3 + round_ % 3)
        events = [experience(n, newest, reward=n % 4, task=f"t{n % 2}", run=str(n)) for n in numbers]
        revised = experience(numbers[1], newest, reward=-1.0, revision=1, task=events[1].task_id, run=str(numbers[1]))
        world.bus.produce(*events[:2], revised, events[0], experience(10 * round_ + 9, oldest), *events[2:])
        await world.run(settings, wait_s=settings.batch_wait_s)  # idle polls let time pass
    return world


def recorded(world: World) -> list[Marked]:
    """Return the experiences in the order of the accounts, with the sizes of the batches."""
    logs = {(r.partition, r.offset): Experience.from_json(r.value or b"") for r in world.bus.records}
    at: dict[int, int] = {}
    marked: list[Marked] = []

    def take(reads: tuple[PartitionRead, ...]) -> None:
        for read in reads:
            marked.extend((logs[read.partition, n], ()) for n in range(at.get(read.partition, 0), read.until))
            at[read.partition] = read.until

    for account in world.bus.accounts:
        for batch in account.batches:
            take(batch.read)
            marked[-1] = (marked[-1][0], (*marked[-1][1], batch.experiences))
        take(account.read)
    rest = [event for (partition, n), event in logs.items() if n >= at.get(partition, 0)]
    assert len(rest) <= 2, "only what has moved nothing yet is in no account"
    return [*marked, *((event, ()) for event in rest)]


def copied(stream: list[Marked]) -> Bus:
    bus = Bus(partitions=1)
    for event, marks in stream:
        headers = Envelope.of(event, "test").headers()
        bus.add("copy", event.to_json(), 0, [*headers, *((BATCH_HEADER, str(mark).encode()) for mark in marks)])
    return bus


def digests(accounts: list[TrainingMetrics]) -> list[str]:
    return [batch.digest for account in accounts for batch in account.batches]


def plan_by_dry_run(world: World, settings: TrainerSettings, stream: list[Marked]) -> DryRunLine:
    dry_run = DryRun(settings, world.blobs)
    for event, marks in stream:
        dry_run.add(event, marks)
    return dry_run.end()


SETTINGS = {"batch_experiences": 4, "batch_experiences_min": 2, "batch_wait_s": 30.0, "max_staleness": 3}
AGAIN = {"lineage": "again", "replays": "main", "topic": "copy", "until_end": True}


@pytest.mark.parametrize("kind", [pytest.param("reinforce++", marks=pytest.mark.long), "grpo"])
async def test_recorded_batches_come_out_the_same(tmp_path: Path, make: Make, kind: str) -> None:
    algorithm = {"advantage": {"kind": kind}, "group_size": 2, "group_wait_s": 1e6}
    world = await live(tmp_path, make(**SETTINGS, **algorithm))
    original, stream = world.bus, recorded(world)
    sizes = [mark for _, marks in stream for mark in marks]
    assert len(set(sizes)) > 1, "time has cut some of the batches"
    assert {"superseded", "stale"} <= set(original.fates.values())

    settings = make(**SETTINGS, **algorithm, **AGAIN, cut="recorded")
    foretold = plan_by_dry_run(world, settings, stream)
    world.bus = copied(stream)
    again = await world.run(settings)
    assert again.lineage is not None, "it ended by itself"
    assert digests(world.bus.accounts) == digests(original.accounts)
    batches = [(batch.digest, batch.experiences) for account in original.accounts for batch in account.batches]
    assert [(batch.digest, batch.experiences) for batch in foretold.batches] == batches
    fates = world.bus.fates
    assert {name for name, outcome in fates.items() if outcome == "trained"} == {
        name for name, outcome in original.fates.items() if outcome == "trained"
    }
    if kind == "reinforce++":  # how long a single run waited for its group is not recorded
        assert fates == original.fates
    counts = Counter(fates.values())
    assert counts == {"trained": foretold.trained} | {str(name): n for name, n in foretold.dropped.items()}


async def test_a_withdrawal_is_rehearsed_with_the_tokens_that_were_trained(tmp_path: Path, make: Make) -> None:
    """A withdrawal has no tokens, so the trainer reads the trained tokens again from the bus to undo them."""
    world, settings = World(tmp_path), make(**SETTINGS)
    await world.run(settings)
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, reward=n % 3, task="t", run=str(n)) for n in range(4)))
    await world.run(settings)
    taken_back = [experience(n, version, None, revision=1, task="t", run=str(n), branch=False) for n in (1, 2)]
    world.bus.produce(*taken_back, experience(9, version, None, branch=False))
    await world.run(settings, wait_s=settings.batch_wait_s)
    foretold = plan_by_dry_run(world, make(**SETTINGS, **AGAIN, cut="recorded"), recorded(world))
    assert len(foretold.batches) == 2
    assert [batch.digest for batch in foretold.batches] == digests(world.bus.accounts)


async def test_by_the_rules_time_is_not_repeated(tmp_path: Path, make: Make) -> None:
    """Batches cut by the rules differ from recorded batches, and a dry run by the rules predicts training by the
    rules."""
    world = await live(tmp_path, make(**SETTINGS))
    original, stream = world.bus, recorded(world)
    settings = make(**SETTINGS, **AGAIN)
    foretold = plan_by_dry_run(world, settings, stream)
    world.bus = copied(stream)
    await world.run(settings)
    assert digests(world.bus.accounts) != digests(original.accounts)
    assert [batch.digest for batch in foretold.batches] == digests(world.bus.accounts)
    assert foretold.versions == world.bus.checkpoints[-1].step
    left = len(stream) - foretold.trained - sum(foretold.dropped.values()) - foretold.duplicates
    assert foretold.waiting == left < SETTINGS["batch_experiences_min"]


async def test_a_step_that_changes_nothing_makes_no_version(tmp_path: Path, make: Make) -> None:
    """The first run has no group to compare with. Later staleness depends on the number of versions."""
    rules = SETTINGS | {"batch_experiences_min": 1, "max_staleness": 1, "optimizer": {"weight_decay": 0.1}}
    settings, world = make(**rules), World(tmp_path)
    await world.run(settings)
    base = world.bus.checkpoints[0].version
    for numbers in ([0], [1, 2], [3, 4], [5]):
        world.bus.produce(*(experience(n, base, reward=n % 3, task="t", run=str(n)) for n in numbers))
        await world.run(settings, wait_s=settings.batch_wait_s)
    batches = [batch.experiences for account in world.bus.accounts for batch in account.batches]
    assert batches == [1, 2, 2], "only the last one is two versions behind"
    foretold = plan_by_dry_run(world, make(**rules, **AGAIN, cut="recorded"), recorded(world))
    assert [batch.digest for batch in foretold.batches] == digests(world.bus.accounts)
    assert foretold.versions == world.bus.checkpoints[-1].step == len(batches) - 1


@pytest.mark.parametrize("recorded_facts", [True, False])
async def test_a_step_without_advantages_makes_no_version_after_others_either(
    tmp_path: Path, make: Make, recorded_facts: bool
) -> None:
    """Without advantages, the momentum of earlier steps moves no weight. The fourth group is one version behind, not
    two."""
    rules = SETTINGS | {"batch_experiences": 2, "max_staleness": 1, "optimizer": {"weight_decay": 0.1}}
    rules |= {"advantage": {"kind": "grpo", "equal_groups": "train"}, "group_size": 2}
    settings, world = make(**rules), World(tmp_path)
    await world.run(settings)
    base = world.bus.checkpoints[0].version
    for group, rewards in enumerate([(0.0, 1.0), (1.0, 1.0), (0.5, 0.5), (0.0, 1.0), (0.0, 1.0)]):
        numbers = (2 * group, 2 * group + 1)
        events = [experience(n, base, r, task=f"t{group}", run=str(n)) for n, r in zip(numbers, rewards, strict=True)]
        world.bus.produce(*events)
        await world.run(settings)
    assert [checkpoint.step for checkpoint in world.bus.checkpoints] == [0, 1, 2]
    assert list(world.bus.fates.values()) == ["trained"] * 8 + ["stale"] * 2
    dry_run = DryRun(make(**rules, **AGAIN, cut="recorded"), world.blobs)
    for batch in recorded_batches(world.bus.accounts) if recorded_facts else ():
        dry_run.expect(batch)
    for event, marks in recorded(world):
        dry_run.add(event, marks)
    plan = dry_run.end()
    assert [batch.digest for batch in plan.batches] == digests(world.bus.accounts)
    assert (plan.versions, plan.dropped) == (2, {"stale": 2})


async def test_a_plan_takes_from_the_record_what_only_weights_decide(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch with an infinite gradient was dropped, and a step with too little entropy made no version."""
    rules = SETTINGS | {"max_staleness": 1, "health": {"entropy_min": 0.5, "patience_steps": 9}}
    settings, world = make(**rules), World(tmp_path)
    await world.run(settings)
    base, calls = world.bus.checkpoints[0].version, iter(range(99))

    def measured(*args: Any, **more: Any) -> StepResult:
        number = next(calls)
        if number == 1:  # the second batch; 2 and 3 are its halves in the search for a row at fault
            raise NotFinite
        result = train(*args, **more)
        return replace(result, measured={**result.measured, "entropy": 0.1 if number in (0, 4) else 0.9})

    monkeypatch.setattr(learners, "train", measured)
    for begin in range(0, 20, 4):
        world.bus.produce(*(experience(n, base, reward=n % 3, task="t", run=str(n)) for n in range(begin, begin + 4)))
        await world.run(settings)
    reports = recorded_batches(world.bus.accounts)
    assert not all(batch.trained for batch in reports)
    assert len(world.bus.checkpoints) - 1 < len(reports) - 1
    dry_run = DryRun(make(**rules, **AGAIN, cut="recorded"), world.blobs)
    for batch in reports:
        dry_run.expect(batch)
    for event, marks in recorded(world):
        dry_run.add(event, marks)
    plan = dry_run.end()
    assert [batch.digest for batch in plan.batches] == digests(world.bus.accounts)
    assert plan.versions == world.bus.checkpoints[-1].step
    counts = Counter(world.bus.fates.values())
    assert counts == {"trained": plan.trained} | {str(name): n for name, n in plan.dropped.items()}


async def test_a_lineage_keeps_its_topic(tmp_path: Path, make: Make) -> None:
    """A replay into an existing lineage's name must not continue that lineage."""
    world = World(tmp_path)
    await world.run(make())
    world.bus.produce(experience(1, world.bus.checkpoints[0].version))
    await world.run(make(), wait_s=60)
    with pytest.raises(SettingError, match=r"trainer.topic = 'copy': lineage main reads experiences; name a new"):
        await world.run(make(topic="copy", until_end=True))


def stream(version: str) -> list[Experience]:
    events = [
        experience(n, version, reward=(n * 5) % 7 / 3, task=f"t{n % 3}", run=str(n), weight=0.5, length=10 + n)
        for n in range(12)
    ]
    return [*events[:7], experience(2, version, reward=-1.0, revision=1, task="t2", run="2"), events[3], *events[7:]]


@pytest.fixture
def replay_digests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the digest of every trained batch is appended."""
    batch_digests: list[str] = []

    def noting(policy: Any, optimizer: Any, batch: Any, *rest: Any, **more: Any) -> Any:
        batch_digests.append(batch.digest())
        return train(policy, optimizer, batch, *rest, **more)

    monkeypatch.setattr(learners, "train", noting)
    return batch_digests


async def batches(folder: Path, settings: Any, digests: list[str], per_poll: int, restart: bool = False) -> list[str]:
    digests.clear()
    world = World(folder)
    await world.run(settings)
    events = stream(world.bus.checkpoints[0].version)
    cut = len(events) // 2 if restart else 0
    if restart:
        world.bus.produce(*events[:cut])
        await world.run(settings, per_poll)
    world.bus.produce(*events[cut:])
    await world.run(settings, per_poll)
    return digests.copy()


@pytest.mark.parametrize(
    "kind", ["reinforce++", pytest.param("grpo", marks=pytest.mark.long), pytest.param("rloo", marks=pytest.mark.long)]
)
async def test_equal_streams_make_equal_batches(
    tmp_path: Path, make: Make, replay_digests: list[str], kind: str
) -> None:
    settings = make(advantage={"kind": kind}, group_size=2, max_staleness=50)
    first = await batches(tmp_path / "a", settings, replay_digests, per_poll=1)
    again = await batches(tmp_path / "b", settings, replay_digests, per_poll=99)
    restarted = await batches(tmp_path / "c", settings, replay_digests, per_poll=2, restart=True)
    assert len(first) >= 2
    assert first == again == restarted


async def test_a_replay_into_a_new_lineage_repeats_batches_and_weights(
    tmp_path: Path, make: Make, replay_digests: list[str]
) -> None:
    """The live run samples from each new version, partly too late; the replay has only the events."""
    world = World(tmp_path)
    settings = make(max_staleness=1, batch_experiences=3)
    live = await world.run(settings)
    for turn in range(5):
        newest, older = world.bus.checkpoints[-1].version, world.bus.checkpoints[max(0, turn - 2)].version
        world.bus.produce(*(experience(10 * turn + n, newest, reward=n % 3, task=f"t{n % 2}") for n in range(3)))
        world.bus.produce(experience(10 * turn + 9, older, reward=5.0))
        live = await world.run(settings)
    original, fates = replay_digests.copy(), world.bus.fates
    assert len(original) == 5
    assert "stale" in fates.values()

    replay_digests.clear()
    world.bus.sent.clear()
    again = await world.run(make(max_staleness=1, batch_experiences=3, lineage="again", replays="main"))
    assert replay_digests == original
    assert world.bus.fates == fates
    assert live.lineage is not None
    assert again.lineage is not None
    replayed_tensors = policy_of(again.lineage).tensors()
    assert all(
        torch.equal(tensor, replayed_tensors[name]) for name, tensor in policy_of(live.lineage).tensors().items()
    )


async def test_without_being_told_a_new_lineage_knows_no_versions_of_another(tmp_path: Path, make: Make) -> None:
    world = World(tmp_path)
    await world.run(make())
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, reward=n) for n in range(4)))
    await world.run(make())
    world.bus.sent.clear()
    await world.run(make(lineage="again"))
    assert set(world.bus.fates.values()) == {"foreign_version"}


@pytest.mark.parametrize(
    ("replays", "message"), [("nothing", "no such lineage in this blob store"), ("main", "is this lineage itself")]
)
async def test_a_replay_of_nothing_is_a_setting_error(tmp_path: Path, make: Make, replays: str, message: str) -> None:
    with pytest.raises(SettingError, match=f"trainer.replays = '{replays}': {message}"):
        await World(tmp_path).run(make(replays=replays))


async def test_another_reward_makes_other_batches(tmp_path: Path, make: Make, replay_digests: list[str]) -> None:
    """The comparison above can fail."""
    first = await batches(tmp_path / "a", make(max_staleness=50), replay_digests, per_poll=1)
    other = await batches(
        tmp_path / "b", make(max_staleness=50, advantage={"scale": "none"}), replay_digests, per_poll=1
    )
    assert first != other
    assert len(first) == len(other)
