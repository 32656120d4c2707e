"""Tests of answers without logprobs of their behaviour policy, and of reported advantages.

An algorithm that needs no logprobs trains such answers, all others leave them out. The advantages in the reported
outcomes are those of the trained rows, which the digest of the batch shows.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from headrace_runtime.errors import SettingError
from headrace_schemas import Experience, TrainingMetrics, TrainingOutcome
from headrace_schemas.events.checkpoint import TurnAdvantage
from headrace_schemas.events.trajectory import NoLogprobs, TurnReward
from headrace_trainer.algorithms.baselines import Baselines
from headrace_trainer.algorithms.losses import LOSSES, LossInputs
from headrace_trainer.batches.batch import Row
from headrace_trainer.batches.prepare import PreparedBatch
from headrace_trainer.experiences import reports
from headrace_trainer.experiences.admission import versions_of
from headrace_trainer.experiences.examples import CorrectionRules, Example
from headrace_trainer.experiences.reports import TrainedExperience, training_outcome
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.learner import StepResult
from headrace_trainer.lineage.culprits import apply_result
from tests.algorithms.losses import CASES, Case
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_state import LIMITS
from tests.unit.trainer.test_step import V, batch_of
from tests.unit.trainer.world import World, edit, experience, side, turn, with_signals

REASONS: tuple[NoLogprobs, ...] = get_args(NoLogprobs)
OTHER_SERVER = "elsewhere@0123456789ab"
TRAINED = {
    "sft": {"e2"},
    "dpo": {"e2", "e3", "e4"},
    "kto": {"e1", "e2", "e3", "e4"},
    "rft": {"e1"},
    "mix": {"e2"},
    "reinforce++": set(),
}
LEAVES_OUT = {"mix", "reinforce++"}


def unsampled(event: Experience, reason: NoLogprobs, *turns: str) -> Experience:
    """Return `event` without logprobs for `turns`, or for all of its turns."""
    assert event.branch is not None
    version = {"version": OTHER_SERVER} if reason == "foreign" else {}
    spans = tuple(
        span.model_copy(update={"logprobs": (0.0,) * len(span.logprobs), "no_logprobs": reason, **version})
        if span.turn_id in (turns or event.turn_ids)
        else span
        for span in event.branch.spans
    )
    branch = event.branch.model_copy(update={"spans": spans})
    return Experience.model_validate(event.model_copy(update={"branch": branch}).model_dump(mode="json"))


def judged(version: str) -> list[Experience]:
    """Return experiences with a rewarded answer, an edited answer, and the two answers of a preference."""
    return [
        with_signals(1, version, reward=1.0),
        with_signals(2, version, edits=(edit("nobody", turn(2)),)),
        with_signals(3, version, preferences=(side("p", "chosen", turn(3)),)),
        with_signals(4, version, preferences=(side("p", "rejected", turn(4)),)),
    ]


@pytest.mark.parametrize("reason", REASONS)
@pytest.mark.parametrize("algorithm", TRAINED)
async def test_each_algorithm_trains_them_unless_it_needs_logprobs(
    tmp_path: Path, make: Make, algorithm: str, reason: NoLogprobs
) -> None:
    world, settings = World(tmp_path), make(algorithm=algorithm, group_wait_s=5, batch_wait_s=5)
    await world.run(settings)
    world.bus.produce(*(unsampled(event, reason) for event in judged(world.bus.checkpoints[0].version)))
    await world.run(settings, wait_s=6)
    outcomes = {outcome.experience_id: outcome for outcome in world.bus.verdicts}
    assert {name for name, outcome in outcomes.items() if outcome.dropped is None} == TRAINED[algorithm]
    assert len(outcomes) == 4, "each has an outcome"
    edited = {"e2"} if algorithm == "mix" else set()
    for name, outcome in outcomes.items():
        left_out = outcome.turn_ids if algorithm in LEAVES_OUT and name not in edited else ()
        assert outcome.left_out == left_out, name
    if algorithm in LEAVES_OUT:
        assert outcomes["e1"].reason == "no_logprobs"


async def test_a_policy_gradient_trains_the_rest_of_the_branch_as_before(tmp_path: Path, make: Make) -> None:
    """P9: a turn without logprobs changes no batch of an algorithm that needs logprobs."""
    settings = make(batch_experiences=1)
    digests, left_out = [], []
    for shortened in (True, False):
        world = World(tmp_path / str(shortened))
        await world.run(settings)
        version = world.bus.checkpoints[0].version
        event = unsampled(experience(1, version, 1.0, versions=[version] * 3), "truncated_sampling", turn(1, 2))
        if shortened:
            assert event.branch is not None
            event = event.model_copy(update={"branch": event.branch.sampled})
        world.bus.produce(event)
        await world.run(settings)
        digests.append([batch.digest for account in world.bus.accounts for batch in account.batches])
        left_out.append([outcome.left_out for outcome in world.bus.verdicts])
    assert digests[0] == digests[1]
    assert digests[0]
    assert left_out == [[()], [(turn(1, 2),)]]


def test_rows_mark_tokens_without_logprobs() -> None:
    event = unsampled(experience(1, "m@0123456789ab", versions=["m@0123456789ab"] * 3), "foreign", turn(1, 1))
    row, plain = Row.of(event, 1.0, "m@0123456789ab"), Row.of(experience(1, "m@0123456789ab"), 1.0, None)
    assert event.branch is not None
    span = event.branch.spans[1]
    assert row.unsampled_T is not None
    assert plain.unsampled_T is None
    assert list(np.flatnonzero(row.unsampled_T)) == list(range(span.start, span.stop))
    assert not row.fresh_T[row.unsampled_T].any()
    assert row.fresh_T[row.loss_mask_T & ~row.unsampled_T].all()


def test_another_servers_answer_has_no_age() -> None:
    version, other = "m@0123456789ab", unsampled(experience(1, "m@0123456789ab"), "foreign")
    greedy = unsampled(experience(1, version), "truncated_sampling")
    rules = CorrectionRules(10.0, 0.01, logprobs=False)
    assert (versions_of(other, rules), versions_of(greedy, rules)) == ((), (version,)), (
        "P5 bounds what a version answered"
    )


def test_a_span_without_logprobs_has_none() -> None:
    event = experience(1, "m@0123456789ab")
    assert event.branch is not None
    fields = event.branch.spans[0].model_dump(mode="json") | {"no_logprobs": "foreign"}
    with pytest.raises(ValueError, match="each of its logprobs must be 0"):
        type(event.branch.spans[0]).model_validate(fields)


def loss_of(case: Case, behaviour_N: torch.Tensor) -> torch.Tensor:
    """Return the losses of two answers of four tokens with the behaviour logprobs `behaviour_N`."""
    draw = torch.Generator().manual_seed(1)
    current_N, start_N, reference_N = (-torch.rand(8, generator=draw) for _ in range(3))
    row_N = torch.tensor([0] * 4 + [1] * 4)
    advantage_N = torch.tensor([1.0] * 4 + [-1.0] * 4)
    inputs = LossInputs(
        current_N, start_N, behaviour_N, advantage_N, row_N, None, reference_N, None, torch.tensor([1, 0])
    )
    return case.loss.function.load()(inputs, case.loss).loss_N


@pytest.mark.parametrize("case", CASES, ids=str)
def test_losses_announce_whether_they_need_logprobs(case: Case) -> None:
    """A loss that needs no logprobs is equal for any behaviour logprobs; a loss that needs them is not."""
    first, second = (loss_of(case, torch.full((8,), value)) for value in (-0.3, -0.9))
    assert torch.equal(first, second) == (not case.loss.function.needs.logprobs)


def test_every_loss_is_tried() -> None:
    assert {case.kind for case in CASES} >= set(LOSSES.names()) - {"mix", "slope"}


def test_a_divergence_by_logprobs_is_refused_where_tokens_have_none(make: Make) -> None:
    options: dict[str, Any] = {"loss": {"kl": 0.1, "kl_kind": "corrected_k3"}}
    with pytest.raises(SettingError, match="needs the engine's logprobs"):
        make(algorithm="sft", **options)
    assert make(algorithm="rft", **options).needs.logprobs


Events = Mapping[tuple[str, int], Experience]


def digest_of(outcomes: Sequence[TrainingOutcome], events: Events) -> str:
    """Return the digest of the batch with these outcomes, by the documented layout and from published events only."""
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
    """Return the batches whose digest does not match the reported advantages."""
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
    """Train four runs of two tasks, and a correction of the first run. Return the published events."""
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

    monkeypatch.setattr(reports, "training_outcome", faulty)
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
