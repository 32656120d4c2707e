"""Answers without logprobs of their sampling policy: trained by each algorithm that needs none, left out by others."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from headrace_runtime.errors import SettingError
from headrace_schemas import Experience
from headrace_schemas.events.trajectory import NoLogprobs
from headrace_trainer.algorithms.losses import LOSSES, LossInputs
from headrace_trainer.batches.batch import Row
from headrace_trainer.experiences.admission import versions_of
from headrace_trainer.experiences.pending_updates import CorrectionRules
from tests.algorithms.losses import CASES, Case
from tests.algorithms.signals import edit, side, turn, with_signals
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import World, experience

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
    """Return the experience without logprobs for `turns`, or for all of its turns."""
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
    """Return a rewarded answer, an edited one, and the two answers of a preference."""
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
    world, settings = World(tmp_path), make(algorithm=algorithm, pair_wait_s=5, batch_wait_s=5)
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
    """P9: a turn without logprobs changes no batch of an algorithm that needs them."""
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
    """Return the losses of two answers of four tokens."""
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
    """Without the need a loss is the same for any logprobs of the engine; with it, it is not."""
    first, second = (loss_of(case, torch.full((8,), value)) for value in (-0.3, -0.9))
    assert torch.equal(first, second) == (not case.loss.function.needs.logprobs)


def test_every_loss_is_tried() -> None:
    assert {case.kind for case in CASES} >= set(LOSSES.names()) - {"mix", "slope"}


def test_a_divergence_by_logprobs_is_refused_where_tokens_have_none(make: Make) -> None:
    options: dict[str, Any] = {"loss": {"kl": 0.1, "kl_kind": "corrected_k3"}}
    with pytest.raises(SettingError, match="needs the engine's logprobs"):
        make(algorithm="sft", **options)
    assert make(algorithm="rft", **options).needs.logprobs
