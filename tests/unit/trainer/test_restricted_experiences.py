"""Restricted experiences pass through a trainer on a bus in memory: each is trained, or dropped with a named detail."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace_schemas import Branch, Experience, Span
from headrace_trainer.backends import BACKENDS
from headrace_trainer.batches.batch import Batch, Row
from headrace_trainer.experiences.admission import limits_of
from headrace_trainer.experiences.replies import ReplyReader
from headrace_trainer.experiences.restrictions import SetBuilder
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import VOCABULARY, World, experience

V = "m@000000000000"


def restricted(number: int, version: str, *, broken: bool = False, sets: int = 4, **fields: Any) -> Experience:
    """Return an experience whose answer has stored sets of `sets` tokens each. `broken` sets lack the sampled token."""
    plain = experience(number, version, **fields)
    assert plain.branch is not None
    (span,), token_ids = plain.branch.spans, plain.branch.token_ids
    draw = random.Random(number)
    stored: list[int] = []
    for token in token_ids[span.start : span.stop]:
        ids = {token, *draw.sample(range(VOCABULARY), sets - 1)} - ({token} if broken else set())
        stored += [len(ids), *sorted(ids)]
    logprobs = (-1.4,) * len(span.logprobs)  # about that of one token in four
    spans = (span.model_copy(update={"stored_sets": tuple(stored), "logprobs": logprobs}),)
    return plain.model_copy(update={"branch": Branch(token_ids=token_ids, spans=spans)})


async def test_restricted_experiences_are_trained_or_dropped_by_name(tmp_path: Path, make: Make) -> None:
    world, settings = World(tmp_path), make(batch_wait_s=1)
    await world.run(settings)
    version = world.bus.checkpoints[0].version
    world.bus.produce(
        restricted(1, version), restricted(2, version, reward=0.0), restricted(3, version, broken=True),
        experience(4, version, reward=0.5), restricted(5, version, reward=-1.0),
    )  # fmt: skip
    await world.run(settings, wait_s=2)
    reasons = {verdict.experience_id: verdict.detail or verdict.dropped for verdict in world.bus.verdicts}
    assert reasons == {"e1": None, "e2": None, "e3": "stored_sets", "e4": None, "e5": None}
    assert world.bus.checkpoints[-1].step > 0
    measured = [step for step in world.reporter.steps if "restricted_fraction" in step]
    assert measured
    assert 0 < measured[0]["restricted_fraction"] <= 1
    assert 0 < measured[0]["restricted_entropy"] < np.log(4) + 1e-6, "each set has four tokens"
    assert measured[0]["restricted_kl_behaviour"] > 0
    assert measured[0]["restricted_mismatch_mean"] > 0


def test_a_back_end_without_sets_drops_restricted_experiences(make: Make) -> None:
    assert not BACKENDS.get("trinity").restricts
    limits = limits_of(make(backend="trinity"), VOCABULARY, 2048)
    assert limits.restriction_problem(restricted(1, V)) == "restricted"
    assert limits.restriction_problem(experience(1, V)) is None
    assert limits_of(make(), VOCABULARY, 2048).restriction_problem(restricted(1, V)) is None


def test_a_row_is_never_built_without_its_sets(base: Path) -> None:
    event = restricted(1, V)
    assert event.branch is not None
    with pytest.raises(AssertionError, match="sets are missing"):
        Row.of(event, 1.0, V)
    row = Row.of(event, 1.0, V, sets=SetBuilder(base, VOCABULARY).build(event.branch))
    assert row.sets is not None
    assert (row.sets.positions_P == np.flatnonzero(row.loss_mask_T)).all()


def test_batches_with_other_sets_have_other_digests(base: Path) -> None:
    """The sets are part of a batch's digest, and unrestricted batches keep theirs."""

    def digest(event: Experience) -> str:
        assert event.branch is not None
        return Batch((Row.of(event, 1.0, V, sets=SetBuilder(base, VOCABULARY).build(event.branch)),)).digest()

    events = [experience(1, V), restricted(1, V), restricted(1, V, sets=5)]
    assert len({digest(event) for event in events}) == 3
    assert digest(events[1]) == digest(Experience.from_json(events[1].to_json()))
    assert digest(events[0]) == Batch((Row.of(experience(1, V), 1.0, V),)).digest()


def test_large_equal_sets_are_one_array(base: Path) -> None:
    builder = SetBuilder(base, VOCABULARY)
    allowed = sorted({7, 9, *range(0, VOCABULARY, 2)})
    span = Span(
        start=2, logprobs=(-1.0, -2.0), turn_id="t", version=V, stored_sets=(len(allowed), *allowed) * 2
    )  # fmt: skip
    sets = builder.build(Branch(token_ids=(5, 6, 7, 9), spans=(span,)))
    assert sets is not None
    assert sets.sets[0] is sets.sets[1]
    assert sets.sets[0].dtype == np.uint8
    assert sets.sets[0].nbytes == VOCABULARY // 8


def test_replies_about_restricted_answers_are_not_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    event = restricted(1, V)
    reader = ReplyReader.__new__(ReplyReader)
    reader._bounds = (0.0, 1.0)
    monkeypatch.setattr(ReplyReader, "read", lambda *_: None)
    rewarded = {"turn_rewards": [{"turn_id": event.turn_ids[0], "value": 1.0}]}
    free = Experience.model_validate({**experience(1, V).model_dump(), **rewarded})
    restricted_event = Experience.model_validate({**event.model_dump(), **rewarded})
    assert len(list(reader.examples(free))) == 1
    assert list(reader.examples(restricted_event)) == []
