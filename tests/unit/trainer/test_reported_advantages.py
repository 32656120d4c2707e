"""Advantages in the reported outcomes: those of the rows that the learner trained, by the digest of the batch."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_schemas import Experience, TrainingMetrics, TrainingOutcome
from headrace_schemas.events.checkpoint import TurnAdvantage
from headrace_schemas.events.experience import TurnReward
from headrace_trainer.algorithms.baselines import Baselines
from headrace_trainer.batches.prepare import PreparedBatch
from headrace_trainer.experiences import state as states
from headrace_trainer.experiences.examples import Example
from headrace_trainer.experiences.reports import training_outcome
from headrace_trainer.experiences.trained_experience import TrainedExperience
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.learner import StepResult
from headrace_trainer.lineage.step_result import apply_result
from tests.algorithms.signals import side, turn, with_signals
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_state import LIMITS
from tests.unit.trainer.test_step import V, batch_of
from tests.unit.trainer.world import World, experience

Events = Mapping[tuple[str, int], Experience]


def digest_of(outcomes: Sequence[TrainingOutcome], events: Events) -> str:
    """Return the digest of the batch with these outcomes, by the documented layout and from published events alone."""
    digest = hashlib.sha256()
    for outcome in outcomes:
        branch = events[outcome.experience_id, outcome.revision].branch
        assert branch is not None
        length = len(branch.token_ids)
        mask, behaviour, by_token = np.zeros(length, "<u1"), np.zeros(length, "<f4"), np.zeros(length, "<f4")
        by_turn = {item.turn_id: item.advantage for item in outcome.turn_advantages}
        for span in branch.spans:
            mask[span.start : span.stop] = 1
            behaviour[span.start : span.stop] = span.logprobs
            by_token[span.start : span.stop] = by_turn.get(span.turn_id, 0.0)
        digest.update(f"{outcome.experience_id}\0{outcome.revision}\0{length}\0".encode())
        digest.update(np.array(branch.token_ids, "<i4").tobytes() + mask.tobytes() + behaviour.tobytes())
        digest.update(np.ones(length, "<f4").tobytes() + np.array(outcome.advantage, "<f4").tobytes())
        if by_turn:
            digest.update(json.dumps(["", "", "", ""]).encode() + by_token.tobytes())
    return digest.hexdigest()


def problems(accounts: Sequence[TrainingMetrics], events: Events) -> list[str]:
    """Return the batches whose digest does not follow from the reported advantages."""
    trained = [account for account in accounts if account.batches]
    assert trained, "no batch was trained"
    wrong = []
    for account in trained:
        (batch,) = account.batches
        outcomes = [outcome for outcome in account.verdicts if outcome.dropped is None]
        if digest_of(outcomes, events) != batch.digest:
            wrong.append(f"step {batch.step}")
    return wrong


async def train(world: World, make: Make, turn_rewards: Sequence[Sequence[float]] = (), **settings: Any) -> Events:
    """Train four runs of two tasks, and a correction of the first one."""
    await world.run(make())
    version = world.bus.checkpoints[0].version
    events = []
    for number, reward in enumerate((1.0, 0.25, 0.0, 0.5)):
        event = experience(number, version, reward, task=f"task-{number % 2}", run=str(number), versions=(version,) * 2)
        if turn_rewards:
            values = zip(event.turn_ids, turn_rewards[number], strict=True)
            rewards = tuple(TurnReward(turn_id=name, value=value) for name, value in values)
            event = event.model_copy(update={"turn_rewards": rewards})
        events.append(event)
    world.bus.produce(*events)
    await world.run(make(**settings), wait_s=31)
    if not turn_rewards:
        events.append(events[0].model_copy(update={"revision": 1, "reward": 0.125}))
        world.bus.produce(events[-1])
        await world.run(make(**settings), wait_s=31)
    return {(event.experience_id, event.revision): event for event in events}


GRPO: dict[str, Any] = {"advantage": {"kind": "grpo"}, "group_size": 2}


async def test_reported_advantages_are_those_of_the_trained_batch(tmp_path: Path, make: Make) -> None:
    world = World(tmp_path)
    events = await train(world, make, **GRPO)
    assert problems(world.bus.accounts, events) == []
    advantages = {(item.experience_id, item.revision): item.advantage for item in world.bus.verdicts}
    spread = statistics.stdev((1.0, 0.0))
    assert advantages["e0", 0] == pytest.approx(0.5 / spread, rel=1e-4)
    assert advantages["e2", 0] == pytest.approx(-0.5 / spread, rel=1e-4)
    correction = advantages["e0", 1]
    assert correction == pytest.approx(-0.875 / spread, rel=1e-4), "the missing advantage"
    assert not any(outcome.turn_advantages for outcome in world.bus.verdicts)


async def test_reported_advantages_of_turns_are_those_of_the_trained_batch(tmp_path: Path, make: Make) -> None:
    world = World(tmp_path)
    rewards = ((1.0, 0.0), (0.5, 0.25), (0.0, 0.0), (0.0, 1.0))
    events = await train(world, make, rewards, algorithm="multi_step_grpo", group_size=2)
    assert problems(world.bus.accounts, events) == []
    first = next(outcome for outcome in world.bus.verdicts if outcome.experience_id == "e0")
    by_turn = {item.turn_id: item.advantage for item in first.turn_advantages}
    assert by_turn["turn-0-0"] > by_turn["turn-0-1"]
    assert first.advantage == pytest.approx(statistics.mean(by_turn.values()), rel=1e-6), "equally long turns"


@pytest.mark.parametrize("fault", ["reward", "sign", "missing turn"])
async def test_planted_fault_in_reported_advantages_is_caught(
    tmp_path: Path, make: Make, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def faulty(event: Experience, *arguments: Any) -> TrainingOutcome:
        outcome = training_outcome(event, *arguments)
        if outcome.advantage is None:
            return outcome
        changes: dict[str, dict[str, Any]] = {
            "reward": {"advantage": event.reward},
            "sign": {"advantage": -outcome.advantage},
            "missing turn": {"turn_advantages": outcome.turn_advantages[1:]},
        }
        return outcome.model_copy(update=changes[fault])

    monkeypatch.setattr(states, "training_outcome", faulty)
    world = World(tmp_path)
    by_turn = fault == "missing turn"
    rewards = ((1.0, 0.0), (0.5, 0.25), (0.0, 0.0), (0.0, 1.0)) if by_turn else ()
    settings = {"algorithm": "multi_step_grpo", "group_size": 2} if by_turn else GRPO
    events = await train(world, make, rewards, **settings)
    assert problems(world.bus.accounts, events) != []


def test_outcome_of_single_answers_names_their_turns_and_edits() -> None:
    event = with_signals(1, V, preferences=(side("p", "chosen", turn(1)),), reward=None)
    item = WaitingExperience(experience=event, since_ms=0)
    records = [
        TrainedExperience(item, 1.0, 0.0, 1.0, example=Example("a", 1.0, "", turn(1)), loss_advantage=1.0),
        TrainedExperience(item, -1.0, 0.0, 1.0, example=Example("b", 1.0, "", turn(1), 0, (7,)), loss_advantage=-1.0),
    ]
    outcome = training_outcome(event, None, None, (), records, LIMITS.rules)
    assert outcome.advantage is None
    assert outcome.turn_advantages == (
        TurnAdvantage(turn_id=turn(1), advantage=1.0),
        TurnAdvantage(turn_id=turn(1), advantage=-1.0, edited=True),
    )


def test_outcome_has_no_advantage_that_a_teacher_computed_and_0_for_a_row_outside_the_loss() -> None:
    batch = batch_of(0.5, -0.25)
    planned = tuple(
        TrainedExperience(WaitingExperience(experience=experience(n, V), since_ms=0), float(row.advantage), 0.0, 1.0)
        for n, row in enumerate(batch.rows)
    )
    prepared = PreparedBatch(batch, planned, Baselines())
    result = StepResult({}, left_out=frozenset({"e1"}))
    assert [record.loss_advantage for record in apply_result(prepared, result)] == [0.5, 0.0]
    by_teacher = apply_result(prepared, StepResult({}), has_teacher=True)
    assert [record.loss_advantage for record in by_teacher] == [None, None]
    by_critic = apply_result(prepared, StepResult({}, advantages={"e0": 0.125}))
    assert [record.loss_advantage for record in by_critic] == [0.125, -0.25]
