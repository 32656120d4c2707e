"""Tests of the whole trainer with edits, preferences, written tokens, critics and teachers: training, reports and
crashes."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_schemas import Experience
from headrace_schemas.events.trajectory import PreferenceSide, TurnReward
from headrace_trainer.batches.batch import Batch, Row, split_into_passes
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_crash import plain_story, tell
from tests.unit.trainer.test_token_estimators import check_learns
from tests.unit.trainer.world import World, decision, edit, experience, side, turn, with_signals

GOING_ON = threading.Event()


def compared(version: str) -> list[Experience]:
    """Return two preference pairs, an edit, an answer without counterpart, and a run with only a reward."""
    return [
        with_signals(1, version, preferences=(side("p", "chosen", turn(1)),)),
        with_signals(2, version, preferences=(side("q", "rejected", turn(2)),)),
        with_signals(3, version, edits=(edit("nobody", turn(3)),)),
        with_signals(4, version, preferences=(side("p", "rejected", turn(4)),)),
        with_signals(5, version, preferences=(side("never", "chosen", turn(5)),)),
        with_signals(6, version, preferences=(side("q", "chosen", turn(6)),)),
        with_signals(7, version, reward=1.0),
    ]


@pytest.mark.parametrize(
    "how", [{}, {"lora": {"rank": 2}}, {"compute": {"packing": "padded", "pack_tokens": 20}}], ids=str
)
async def test_answers_meet_across_experiences_and_the_rest_says_why_not(
    tmp_path: Path, make: Make, how: dict[str, Any]
) -> None:
    world, settings = World(tmp_path), make(algorithm="dpo", group_wait_s=5, batch_wait_s=5, **how)
    await world.run(settings)
    world.bus.produce(*compared(world.bus.checkpoints[0].version))
    await world.run(settings, wait_s=6)
    reasons = {verdict.experience_id: verdict.detail or verdict.dropped for verdict in world.bus.verdicts}
    assert reasons == {
        "e1": None, "e2": None, "e3": None, "e4": None, "e6": None, "e5": "unpaired", "e7": "no_signal"
    }  # fmt: skip
    assert world.bus.checkpoints[-1].step > 0, "and a version was made of them"


async def test_a_restart_between_two_answers_loses_neither(tmp_path: Path, make: Make) -> None:
    world, settings = World(tmp_path), make(algorithm="dpo", group_wait_s=1e6)
    await world.run(settings)
    events = compared(world.bus.checkpoints[0].version)
    for event in events[:4] + events[5:6]:
        world.bus.produce(event)
        await world.run(settings)
    await world.run(settings, wait_s=31)
    assert {name for (name, _), outcome in world.bus.fates.items() if outcome == "trained"} == {
        "e1",
        "e2",
        "e3",
        "e4",
        "e6",
    }


@pytest.mark.parametrize("algorithm", ["sft", "dpo", "kto", "mix"])
async def test_p9_a_dry_run_makes_the_same_batches(tmp_path: Path, make: Make, algorithm: str) -> None:
    """The stream includes withdrawals after training, because digests do not depend on weights."""
    settings = make(algorithm=algorithm, batch_experiences=2, until_end=True, steps_per_version=100)

    def events_of(version: str) -> list[Experience]:
        edited = [with_signals(number, version, edits=(edit("a question", turn(number)),)) for number in (8, 9)]
        withdrawn = with_signals(1, version, revision=1)
        revised = with_signals(3, version, edits=(edit("Monday", turn(3)),), revision=1)
        return [*compared(version), *edited, withdrawn, revised]

    live, dry = await World(tmp_path).digests_live_and_dry(settings, events_of)
    assert len(live) >= 2
    assert dry == live


async def test_a_withdrawn_preference_is_trained_back(tmp_path: Path, make: Make) -> None:
    """Each side is undone separately, with the weight and slope of its first training."""
    world, settings = World(tmp_path), make(algorithm="dpo", steps_per_version=100, batch_experiences=2)
    await world.run(settings)
    version = world.bus.checkpoints[0].version
    world.bus.produce(*compared(version)[0:4:3])
    trainer = await world.run(settings)
    assert trainer.lineage is not None
    world.bus.produce(with_signals(1, version, revision=1), with_signals(4, version, revision=1))
    trainer = await world.run(settings)
    assert trainer.lineage is not None
    for name in ("e1", "e4"):
        entry = trainer.lineage.state.window.get(name)
        assert entry is not None
        first, back = entry.contributions
        assert (first.part, first.advantage) == (back.part, -back.advantage)
        assert first.token_weight == back.token_weight > 0
        assert first.token_weight != pytest.approx(world.reporter.steps[0]["token_weight"]), "a slope is in it"


@pytest.mark.parametrize("algorithm", ["dpo", "grpo"])
async def test_a_queue_full_of_what_waits_in_vain_makes_room(tmp_path: Path, make: Make, algorithm: str) -> None:
    """No time passes, so no answer is late; but the full queue has no space for its counterpart."""
    settings = make(algorithm=algorithm, group_size=2, until_end=True, memory={"queue_experiences": 4})
    world = World(tmp_path)
    await world.run(settings)
    version = world.bus.checkpoints[0].version

    def run(number: int, task: str, sides: tuple[PreferenceSide, ...]) -> Experience:
        feedback: dict[str, Any] = {"preferences": sides} if algorithm == "dpo" else {"reward": float(number % 2)}
        return with_signals(number, version, task=task, run=str(number), **feedback)

    world.bus.produce(*(run(n, f"t{n}", (side(f"p{n}", "chosen", turn(n)),)) for n in range(9)))
    world.bus.produce(run(20, "t", (side("q", "chosen", turn(20)),)), run(21, "t", (side("q", "rejected", turn(21)),)))
    await world.run(settings)
    fates = world.bus.fates
    assert {fates["e20", 0], fates["e21", 0]} == {"trained"}
    assert list(fates.values()).count("singleton") == 9


async def test_what_a_refusal_undoes_is_trained_again_whole(tmp_path: Path, make: Make) -> None:
    """An edit is two rows of one step, and both are trained again."""
    world, settings = World(tmp_path), make(algorithm="dpo", batch_experiences=1)
    await world.run(settings)
    base = world.bus.checkpoints[0].version
    world.bus.produce(with_signals(3, base, edits=(edit("nobody", turn(3)),)))
    await world.run(settings)
    world.bus.produce(decision(world.bus.checkpoints[-1].version, "rejected", base))
    trainer = await world.run(settings)
    assert trainer.lineage is not None
    entry = trainer.lineage.state.window.get("e3")
    assert entry is not None
    assert [contribution.step for contribution in entry.contributions] == [1, 1, 2, 2]
    assert [
        contribution.advantage for contribution in entry.contributions_in_weights(trainer.lineage.state.history, 2)
    ] == [
        1.0,
        -1.0,
    ]
    assert world.bus.fates == {("e3", 0): "trained"}


async def test_several_updates_remember_the_slope_of_the_first(tmp_path: Path, make: Make) -> None:
    world, settings = World(tmp_path), make(algorithm="dpo", batch_experiences=1, loss={"updates_per_step": 2})
    await world.run(settings)
    world.bus.produce(with_signals(3, world.bus.checkpoints[0].version, edits=(edit("nobody", turn(3)),)))
    trainer = await world.run(settings)
    assert trainer.lineage is not None
    entry = trainer.lineage.state.window.get("e3")
    assert entry is not None
    factor, (batch,) = (
        world.reporter.steps[0]["token_weight"],
        {contribution.token_weight for contribution in entry.contributions},
    )
    tokens = world.reporter.steps[0]["loss_tokens"]
    assert batch == pytest.approx(factor * 0.1 * tokens / 2, rel=1e-5), "beta, at the base, and a mean over two answers"


async def test_a_revised_edit_takes_the_old_tokens_back(tmp_path: Path, make: Make) -> None:
    world, settings = World(tmp_path), make(algorithm="sft", steps_per_version=100, batch_experiences=1)
    await world.run(settings)
    version = world.bus.checkpoints[0].version
    world.bus.produce(with_signals(3, version, edits=(edit("nobody", turn(3)),)))
    world.bus.produce(with_signals(3, version, edits=(edit("Monday", turn(3)),), revision=1))
    trainer = await world.run(settings, per_poll=1)
    assert trainer.lineage is not None
    entry = trainer.lineage.state.window.get("e3")
    assert entry is not None
    assert [contribution.advantage for contribution in entry.contributions] == [1.0, 1.0, -1.0]
    old, new, back = (contribution.what for contribution in entry.contributions)
    assert old is not None
    assert new is not None
    assert back is not None
    assert old.tokens == back.tokens != new.tokens


async def test_written_tokens_train_whatever_version_serves(tmp_path: Path, make: Make) -> None:
    world, settings = World(tmp_path), make(algorithm="sft", max_staleness=0, batch_experiences=1)
    await world.run(settings)
    base = world.bus.checkpoints[0].version
    for number in range(3):  # each makes a version, so the later ones would be stale
        world.bus.produce(with_signals(number, base, origin="written", no_reward="no_reward"))
        await world.run(settings)
    assert set(world.bus.fates.values()) == {"trained"}
    assert len(world.bus.checkpoints) == 4


async def test_written_tokens_are_refused_where_logprobs_are_needed(tmp_path: Path, make: Make) -> None:
    world, settings = World(tmp_path), make()
    await world.run(settings)
    world.bus.produce(with_signals(1, world.bus.checkpoints[0].version, origin="written", reward=1.0))
    await world.run(settings)
    assert [(verdict.dropped, verdict.detail) for verdict in world.bus.verdicts] == [("invalid", "written")]


async def test_equal_groups_make_room_for_others(tmp_path: Path, make: Make) -> None:
    world, settings = World(tmp_path), make(algorithm="dapo", group_size=2, batch_experiences=2)
    await world.run(settings)
    version = world.bus.checkpoints[0].version
    runs = [
        experience(n, version, reward, task=f"t{n // 2}", run=str(n)) for n, reward in enumerate((1.0, 1.0, 0.0, 1.0))
    ]
    world.bus.produce(*runs)
    await world.run(settings, wait_s=31)
    reasons = {verdict.experience_id: verdict.detail or verdict.dropped for verdict in world.bus.verdicts}
    assert reasons == {"e0": "equal_rewards", "e1": "equal_rewards", "e2": None, "e3": None}


async def test_turns_have_advantages_of_their_own_and_a_revision_of_one_turn_is_credited_to_it(
    tmp_path: Path, make: Make
) -> None:
    settings = make(algorithm="multi_step_grpo", group_size=2, batch_experiences=2, steps_per_version=100)
    world = World(tmp_path)
    await world.run(settings)
    version = world.bus.checkpoints[0].version

    def run(number: int, reward: float, first: float, second: float, revision: int = 0) -> Experience:
        turns = tuple(TurnReward(turn_id=turn(number, k), value=value) for k, value in enumerate((first, second)))
        return with_signals(
            number, version, reward=reward, task="t", run=str(number), versions=[version] * 2, turn_rewards=turns,
            revision=revision,
        )  # fmt: skip

    world.bus.produce(run(1, 1.0, 1.0, 0.0), run(2, 0.0, 0.0, 1.0))
    await world.run(settings, wait_s=31)
    world.bus.produce(run(1, 1.0, 1.0, 1.0, revision=1))
    trainer = await world.run(settings, wait_s=31)
    assert trainer.lineage is not None
    entry = trainer.lineage.state.window.get("e1")
    assert entry is not None
    first, back = entry.contributions
    spread = np.std([1.0, 0.0, 0.0, 1.0], ddof=1) + 1e-6
    run_advantage = 0.5 / (np.std([0.0, 1.0], ddof=1) + 1e-6)
    assert first.turns == pytest.approx([run_advantage, run_advantage - 0.5 / spread], abs=1e-5)
    assert back.turns == pytest.approx([1.0 / spread, 1.0 / spread], abs=1e-5), "the second turn's, and what led to it"


@pytest.mark.parametrize(
    "overrides",
    [
        {"algorithm": "ppo", "critic": {"learning_rate": 0.1}},
        {"algorithm": "gspo", "group_size": 8},
        {"algorithm": "cispo", "group_size": 8},
        {"algorithm": "opmd", "group_size": 8},
        {"algorithm": "multi_step_grpo", "group_size": 8},
        {"algorithm": "kto"},
        {"algorithm": "mix"},
    ],
    ids=lambda overrides: overrides["algorithm"],
)
def test_it_learns_upwards(tmp_path: Path, make: Make, overrides: dict[str, Any]) -> None:
    check_learns(tmp_path, make, margin=0.1, **overrides)


def test_rows_that_belong_together_are_in_one_pass() -> None:
    rows = [Row.of(experience(n, "m@000000000000", length=10), 1.0, None) for n in range(4)]
    apart = split_into_passes(rows, 10)
    assert sorted(map(len, apart)) == [1, 1, 1, 1]
    tied = [dataclasses.replace(row, together="p" if n in (0, 3) else "") for n, row in enumerate(rows)]
    assert sorted(split_into_passes(tied, 10)) == [[0, 3], [1], [2]], "even where that is more than a pass should hold"
    assert Batch(tuple(tied)).digest() != Batch(tuple(rows)).digest()


def story(world: World, version: str) -> None:
    """Produce preference pairs, and edits that are trained, redelivered, revised and withdrawn, with a poisoned
    record."""
    first = [
        with_signals(1, version, preferences=(side("p", "chosen", turn(1)),)),
        with_signals(2, version, preferences=(side("p", "rejected", turn(2)),)),
        with_signals(3, version, edits=(edit("nobody", turn(3)),)),
        with_signals(4, version, preferences=(side("q", "chosen", turn(4)),), edits=(edit("search", turn(4)),)),
        with_signals(5, version, preferences=(side("q", "rejected", turn(5)),)),
        with_signals(6, version, reward=1.0),
        with_signals(7, version, edits=(edit("Monday", turn(7)),)),
    ]
    world.bus.produce(*first, first[2], first[0])
    world.bus.add("experiences", b"poison")
    world.bus.produce(
        with_signals(1, version, revision=1),
        with_signals(3, version, edits=(edit("an invoice", turn(3)),), revision=1),
        with_signals(8, version, edits=(edit("the agent", turn(8)),)),
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("algorithm", "stride"),
    [
        ("dpo", 29),
        ("ppo", 37),
        *(pytest.param(name, 1, marks=[pytest.mark.own_target, pytest.mark.timeout(3000)]) for name in ("sft", "dpo")),
    ],
)
async def test_a_death_at_any_point_changes_nothing(tmp_path: Path, make: Make, algorithm: str, stride: int) -> None:
    settings = make(algorithm=algorithm, memory={"restore_points": 3}, group_wait_s=1e6, batch_experiences=2)
    told_story = plain_story if algorithm == "ppo" else story
    expected, world, points = await tell(tmp_path / "calm", settings, told_story)
    assert expected["steps"] >= 2
    assert list(world.bus.fates.values()).count("trained") >= 4
    for at in range(1, points + 1, stride):
        result, _, _ = await tell(tmp_path / f"{at}", settings, told_story, at)
        assert result == expected, f"died at point {at}"
