"""Tests of the training loop: reading, training, reports, refusals, and a bounded queue."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace_runtime.errors import DiskFull, InvalidEvent, Unavailable
from headrace_runtime.kafka.wire import encode
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import read_manifest
from headrace_schemas import Event, Experience
from headrace_schemas.values.blobs import BlobRef
from headrace_trainer.learner import NotFinite, StepResult
from headrace_trainer.lineage.store import LineageStore
from headrace_trainer.torch_learner import learner as learners
from headrace_trainer.torch_learner.step import train
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import World, experience


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def begin(world: World, make: Make, **settings: Any) -> str:
    """Open a new lineage once, and return the version of its base."""
    await world.run(make(**settings))
    return world.bus.checkpoints[0].version


async def test_the_base_is_published_first(world: World, make: Make, base: Path) -> None:
    version = await begin(world, make)
    (checkpoint,), (account,) = world.bus.checkpoints, world.bus.accounts
    assert (checkpoint.step, checkpoint.parent, checkpoint.lineage) == (0, None, "main")
    assert (account.account, account.version, account.verdicts) == (0, version, ())
    manifest = read_manifest(world.blobs, checkpoint.manifest)
    assert manifest.version == version
    (weights,) = (file for file in manifest.files if file.path == "model.safetensors")
    assert world.blobs.get(weights.blob) == (base / "model.safetensors").read_bytes(), "byte for byte"


@pytest.mark.parametrize("rank", [0, 4])
async def test_a_full_batch_makes_a_step_a_version_and_an_account(world: World, make: Make, rank: int) -> None:
    version = await begin(world, make, lora={"rank": rank})
    world.bus.produce(*(experience(n, version, reward=n % 2) for n in range(4)))
    await world.run(make(lora={"rank": rank}))
    checkpoint = world.bus.checkpoints[-1]
    assert (checkpoint.step, checkpoint.parent) == (1, version)
    manifest = read_manifest(world.blobs, checkpoint.manifest)
    assert (manifest.kind, manifest.base) == (("lora", version) if rank else ("full", None))
    account = world.bus.accounts[-1]
    assert (account.version, account.step) == (checkpoint.version, 1)
    assert world.bus.fates == {(f"e{n}", 0): "trained" for n in range(4)}
    assert account.verdicts[0].turn_ids == ("turn-0-0",)
    assert account.metrics["trained"] == 4
    assert account.metrics["reward_mean"] == 0.5
    for name in ("loss", "entropy", "gradient_norm", "kl_behaviour", "clip_fraction", "mismatch_mean", "mismatch_p99",
                 "advantage_std", "staleness/0", "tokens_per_second"):  # fmt: skip
        assert name in account.metrics, name
    assert checkpoint.metrics == account.metrics


async def test_a_version_takes_as_many_steps_as_it_is_told(world: World, make: Make) -> None:
    version = await begin(world, make, steps_per_version=3)
    world.bus.produce(*(experience(n, version, reward=n % 3) for n in range(28)))
    trainer = await world.run(make(steps_per_version=3))
    assert [checkpoint.step for checkpoint in world.bus.checkpoints] == [0, 1, 2]
    assert trainer.lineage is not None
    assert trainer.lineage.state.steps == 7
    assert [metrics["mismatch_tokens"] > 0 for metrics in world.reporter.steps if "mismatch_tokens" in metrics] == [
        True
    ]
    assert set(world.bus.fates.values()) == {"trained"}


async def test_max_steps_ends_the_process_with_everything_saved(world: World, make: Make) -> None:
    settings = make(steps_per_version=2, max_steps=3)
    version = await begin(world, make, steps_per_version=2)
    world.bus.produce(*(experience(n, version, reward=n % 3) for n in range(40)))
    await asyncio.wait_for(world.trainer(settings).run(), 20)
    assert [checkpoint.step for checkpoint in world.bus.checkpoints] == [0, 1, 2], "the last one has one step"
    assert len(world.bus.fates) == 12
    await asyncio.wait_for(world.trainer(settings).run(), 20)
    assert len(world.bus.fates) == 12, "and it stays that way"


async def test_a_smaller_batch_goes_by_time(world: World, make: Make) -> None:
    settings = make(batch_wait_s=5.0, batch_experiences_min=2)
    version = await begin(world, make)
    world.bus.produce(*(experience(n, version, reward=n) for n in range(2)))
    await world.run(settings)
    assert world.bus.fates == {}
    await world.run(settings, wait_s=6)
    assert world.bus.fates == {("e0", 0): "trained", ("e1", 0): "trained"}


async def test_weights_that_did_not_change_are_never_published(world: World, make: Make) -> None:
    version = await begin(world, make)
    world.bus.produce(*(experience(n, version, reward=0.5, task="same") for n in range(4)))
    trainer = await world.run(make())
    assert [checkpoint.version for checkpoint in world.bus.checkpoints] == [version]
    assert trainer.lineage is not None
    assert trainer.lineage.state.steps == 1
    assert set(world.bus.fates.values()) == {"trained"}, "accounted for all the same"
    assert len(world.bus.accounts) == 2, "one save, not one per turn of the loop"
    world.bus.produce(*(experience(n, version, reward=n % 2, task="same") for n in range(10, 14)))
    await world.run(make())
    assert [checkpoint.step for checkpoint in world.bus.checkpoints] == [0, 1]


async def test_an_untrained_adapter_is_its_base_and_not_published(world: World, make: Make) -> None:
    version = await begin(world, make, lora={"rank": 4})
    world.bus.produce(*(experience(n, version, reward=0.5, task="same") for n in range(4)))
    await world.run(make(lora={"rank": 4}))
    assert len(world.bus.checkpoints) == 1


async def test_other_models_are_passed_over_without_an_outcome(world: World, make: Make) -> None:
    version = await begin(world, make)
    world.bus.produce(*(experience(n, version, model="other") for n in range(4)))
    trainer = await world.run(make())
    assert world.bus.fates == {}
    assert trainer.lineage is not None
    assert sum(trainer.lineage.state.offsets["experiences"].values()) == 4


POISON = {
    "no json": (b"\x80\x04x", "invalid_json"),
    "nothing": (None, "empty_value"),
    "another shape": (b'{"experience_id": 3}', "invalid_event"),
    "unequal lengths": (b'{"time":"2026-01-01T00:00:00Z","branch":{"token_ids":[1],"spans":[]}}', "invalid_event"),
    "reward and no reward": (
        b'{"time":"2026-01-01T00:00:00Z","experience_id":"x","trajectory_id":"x","session_key":"aaaaaaaaaaaaaaaa",'
        b'"session_id":"x","model":"m","reward":1.0,"no_reward":"withdrawn"}',
        "invalid_event",
    ),
}


async def test_poison_goes_to_dead_letters_and_nothing_else_stops(world: World, make: Make) -> None:
    version = await begin(world, make)
    events = [experience(n, version, reward=n % 2) for n in range(4)]
    world.bus.produce(events[0])
    for value, _ in POISON.values():
        world.bus.add("experiences", value)
    world.bus.add("experiences", b"{}", headers=[("ce_dataref", b"x")])
    world.bus.add("model-events", b"{}")
    world.bus.produce(*events[1:])
    trainer = await world.run(make())
    reasons = [error.reason for _, error in world.bus.refused]
    assert reasons == [*(reason for _, reason in POISON.values()), "invalid_blob_reference", "invalid_event"]
    assert set(world.bus.fates.values()) == {"trained"}
    assert trainer.lineage is not None
    assert len(world.bus.records) == sum(sum(p.values()) for p in trainer.lineage.saved.offsets.values())


async def test_a_large_experience_comes_from_the_blob_store(world: World, make: Make) -> None:
    version = await begin(world, make)
    large = experience(1, version).model_copy(update={"turn_ids": tuple(f"{n:0>200}" for n in range(1400))})
    outgoing = await encode(large, "test", world.blobs)
    assert outgoing.value is not None
    assert len(outgoing.value) < 1000
    world.bus.add("experiences", outgoing.value, headers=outgoing.headers)
    world.bus.produce(*(experience(n, version, reward=0) for n in range(2, 5)))
    await world.run(make())
    assert set(world.bus.fates.values()) == {"trained"}
    assert len(world.bus.verdicts[0].turn_ids) == 1400


async def test_a_full_queue_holds_the_bus_back_until_it_has_room(world: World, make: Make) -> None:
    """Runs of `grpo` never complete their group: the full queue makes room for missing members."""
    settings = make(
        advantage={"kind": "grpo"},
        group_size=2,
        group_wait_s=100.0,
        memory={"queue_experiences": 6},
    )
    version = await begin(world, make)
    world.bus.produce(*(experience(n, version, task=f"t{n}", run="0") for n in range(20)))
    trainer = await world.run(settings, per_poll=50)
    assert trainer.lineage is not None
    assert max(world.source.rooms) == 6
    assert len(trainer.lineage.state.waiting) == 20 % 6
    await world.run(settings, per_poll=50, wait_s=101)
    assert list(world.bus.fates.values()) == ["singleton"] * 20, "pitfall 11: refused with a reason, not trained"


async def test_the_queue_is_bounded_by_tokens_too(world: World, make: Make) -> None:
    settings = make(batch_experiences=64, batch_wait_s=1e9, memory={"queue_tokens": 50, "sequence_tokens": 50})
    version = await begin(world, make)
    world.bus.produce(*(experience(n, version, length=20, reward=n) for n in range(9)))
    await world.run(settings, per_poll=1)
    assert set(world.bus.fates.values()) == {"trained"}
    assert [metrics["experiences"] for metrics in world.reporter.steps] == [3.0, 3.0, 3.0], "a full queue is a batch"


async def test_grpo_trains_whole_groups(world: World, make: Make) -> None:
    settings = make(advantage={"kind": "grpo"}, group_size=4)
    version = await begin(world, make)
    world.bus.produce(*(experience(n, version, reward=n, task=f"t{n % 2}", run=str(n)) for n in range(8)))
    await world.run(settings)
    assert set(world.bus.fates.values()) == {"trained"}
    trained = [verdict.experience_id for verdict in world.bus.verdicts]
    assert trained == ["e0", "e2", "e4", "e6", "e1", "e3", "e5", "e7"]


async def test_outcomes_without_a_step_are_saved_by_time_and_by_number(
    world: World, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await begin(world, make)
    world.bus.produce(*(experience(n, version, reward=None) for n in range(10)))
    with monkeypatch.context() as patch:
        patch.setattr("headrace_trainer.lineage.lineage.OUTCOMES_PER_SAVE", 8)
        await world.run(make(save_interval_s=1e9), per_poll=5)
    assert len(world.bus.verdicts) == 8
    assert [account.version for account in world.bus.accounts[1:]] == [None]
    assert world.bus.sent[-1].topic == "training-metrics"
    assert len(world.bus.sent) == 5, (
        "at both starts checkpoint and account, then the account alone: there is no version"
    )
    world.bus.produce(experience(20, version, reward=None))
    await world.run(make(save_interval_s=1e9))
    assert len(world.bus.verdicts) == 8, "three alone wait"
    await world.run(make())
    assert len(world.bus.verdicts) == 11


async def test_a_bus_that_is_away_for_a_moment_is_waited_for(world: World, make: Make) -> None:
    version = await begin(world, make)
    world.bus.produce(*(experience(n, version, reward=n) for n in range(4)))
    send, failures = world.bus.send, iter(range(3))

    async def sometimes(event: Event) -> None:
        if next(failures, None) is not None:
            raise Unavailable("away")
        await send(event)

    world.bus.send = sometimes  # type: ignore[method-assign]
    await world.run(make())
    assert set(world.bus.fates.values()) == {"trained"}


async def test_a_disk_that_is_full_at_a_save_is_waited_for(
    world: World, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk stays full for longer than any other dependency may be unavailable."""
    version = await begin(world, make)
    world.bus.produce(*(experience(n, version, reward=n) for n in range(4)))
    put, refused = BlobStore.put, 0

    def full(self: BlobStore, data: bytes) -> BlobRef:
        nonlocal refused
        if refused < 8:
            refused += 1
            raise DiskFull("disk: no space left on /data/blobs")
        return put(self, data)

    monkeypatch.setattr(BlobStore, "put", full)
    await world.run(make())
    assert refused == 8
    assert set(world.bus.fates.values()) == {"trained"}


async def test_a_bus_that_stays_away_ends_the_process_and_the_next_one_reports(world: World, make: Make) -> None:
    version = await begin(world, make)
    world.bus.produce(*(experience(n, version, reward=n) for n in range(4)))
    send = world.bus.send
    started = len(world.bus.sent)

    async def never(event: Event) -> None:
        if len(world.bus.sent) >= started + 2:  # what it repeats at its start goes through
            raise Unavailable("away")
        await send(event)

    world.bus.send = never  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        await world.run(make())
    assert world.bus.fates == {}
    world.bus.send = send  # type: ignore[method-assign]
    await world.run(make())
    assert set(world.bus.fates.values()) == {"trained"}
    assert [checkpoint.step for checkpoint in world.bus.checkpoints] == [0, 1]


async def test_a_restart_repeats_its_last_announcements_with_the_same_ids(world: World, make: Make) -> None:
    version = await begin(world, make)
    world.bus.produce(*(experience(n, version, reward=n) for n in range(4)))
    await world.run(make())
    last = world.bus.sent[-2:]
    assert [event.topic for event in last] == ["checkpoints", "training-metrics"]
    await world.run(make())
    assert world.bus.sent[-2:] == last
    assert [event.to_json() for event in world.bus.sent[-2:]] == [event.to_json() for event in last]


async def test_the_loop_answers_while_a_step_runs_and_a_stop_abandons_it(
    world: World, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await begin(world, make)
    world.bus.produce(*(experience(n, version, reward=n) for n in range(4)))
    running = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(*args: Any, **more: Any) -> StepResult:
        loop.call_soon_threadsafe(running.set)
        stop: threading.Event = args[-1]
        assert stop.wait(20)
        return train(*args, **more)

    monkeypatch.setattr(learners, "train", slow)
    trainer = world.trainer(make())
    task = asyncio.create_task(trainer.run())
    async with asyncio.timeout(20):
        await running.wait()  # the loop turns although the step does not end
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert world.bus.fates == {}
    monkeypatch.setattr(learners, "train", train)
    await world.run(make())
    assert set(world.bus.fates.values()) == {"trained"}, "and nothing was lost"


async def test_a_gradient_that_is_not_finite_costs_its_batch_only(
    world: World, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = await begin(world, make)
    world.bus.produce(*(experience(n, version, reward=n) for n in range(8)))
    calls = iter(range(99))

    def broken(policy: Any, *args: Any, **more: Any) -> StepResult:
        if next(calls) == 0:
            raise NotFinite
        return train(policy, *args, **more)

    monkeypatch.setattr(learners, "train", broken)
    await world.run(make())
    assert list(world.bus.fates.values()) == ["invalid"] * 4 + ["trained"] * 4


async def test_a_copy_of_the_topic_can_be_trained_on(world: World, make: Make) -> None:
    version = await begin(world, make)
    for n in range(4):
        event: Experience = experience(n, version, reward=n)
        world.bus.add("replay-1", event.to_json())
    await world.run(make(topic="replay-1"))
    assert set(world.bus.fates.values()) == {"trained"}


async def test_refusing_waits_for_the_bus(world: World, make: Make) -> None:
    await begin(world, make)
    world.bus.add("experiences", b"poison")
    refuse, failures = world.bus.refuse, iter(range(2))

    async def sometimes(record: Any, error: InvalidEvent) -> None:
        if next(failures, None) is not None:
            raise Unavailable("away")
        await refuse(record, error)

    world.bus.refuse = sometimes  # type: ignore[method-assign]
    await world.run(make())
    assert len(world.bus.refused) == 1


def test_blobs_can_be_anywhere(tmp_path: Path) -> None:
    """The state is stored only through `BlobStore`, so a store without rename also works."""
    assert LineageStore(BlobStore(f"memory://{tmp_path.name}"), "main").read() is None
