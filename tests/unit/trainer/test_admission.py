"""Tests of the admission of experiences: one case for each row of the decision table, and the staleness bound (P5).

The bound holds on arrival, in the queue, when a batch is built, after a restart, and for corrections.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from headrace_schemas import Branch, Experience, Span
from headrace_schemas.events.chat import SAMPLED_TEMPERATURE_MIN
from headrace_trainer.batches.prepare import prepare
from headrace_trainer.experiences.admission import AdmissionLimits, Decision, decide, pending_updates_of
from headrace_trainer.experiences.history import History
from headrace_trainer.experiences.window import Contribution, Entry
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.test_history import chain, name, publish
from tests.unit.trainer.world import World, decision, experience

LIMITS = AdmissionLimits(
    vocabulary=320, sequence_tokens=20, max_staleness=2, reward_max=100.0, advantage_max=10.0, correction_min=0.01
)
HISTORY = chain(5)


def entry(*revisions: int, trained: float | None = None, step: int = 4) -> Entry:
    contributions = () if trained is None else (Contribution(step=step, advantage=trained),)
    return Entry(
        revisions=revisions, versions=(name(4),), contributions=contributions, baseline=0.5, scale=0.5, touched_ms=0
    )


def arrives(entry: Entry | None = None, version: int = 5, **fields: Any) -> Decision:
    return decide(experience(1, name(version), **fields), entry, HISTORY, 5, LIMITS)


QUEUED = Decision("queue", None, replaces=True)


def dropped(reason: Any) -> Decision:
    return Decision("drop", reason, replaces=True)


def test_a_fresh_experience_waits() -> None:
    assert arrives() == QUEUED
    assert arrives(version=3) == QUEUED, "two versions behind, as far as the bound"


@pytest.mark.parametrize("version", [2, 0])
def test_p5_too_old_a_version_is_stale(version: int) -> None:
    assert arrives(version=version) == dropped("stale")


def test_p5_the_oldest_span_decides() -> None:
    assert arrives(versions=[name(5), name(2), name(4)]) == dropped("stale")


def test_an_unknown_version_is_foreign() -> None:
    assert arrives(version=77) == dropped("foreign_version")
    assert arrives(versions=[name(5), name(77)]) == dropped("foreign_version")


@pytest.mark.parametrize("why", ["no_reward", "required_source_missing", "withdrawn"])
def test_p6_without_a_reward_it_is_dropped_for_the_reason_it_names(why: Any) -> None:
    assert arrives(reward=None, no_reward=why) == dropped(why)
    assert arrives(reward=None, no_reward=why, branch=False) == dropped(why)


def test_too_long() -> None:
    assert arrives(length=20) == QUEUED
    assert arrives(length=21) == dropped("too_long")


def test_a_token_that_the_model_lacks_is_invalid() -> None:
    odd = decide(experience(1, name(5)), None, HISTORY, 5, AdmissionLimits(100, 20, 2, 1e6, 10.0, 0.01))
    assert odd == Decision("drop", "invalid", replaces=True, detail="vocabulary")


@pytest.mark.parametrize("temperature", [1e-320, 1e-39, 1e-9, math.nextafter(1e-6, 0.0)])
def test_a_temperature_that_float32_cannot_divide_by_makes_no_event(temperature: float) -> None:
    with pytest.raises(ValidationError, match=r"temperature\n  must be between 1e-06 and 1e\+06"):
        Span(start=1, logprobs=(-1.0,), turn_id="t", version=name(5), temperature=temperature)


@pytest.mark.parametrize("temperature", [1e-6, 1e-3, math.nextafter(SAMPLED_TEMPERATURE_MIN, 0.0)])
def test_a_temperature_at_which_nothing_is_sampled_is_invalid(temperature: float) -> None:
    span = Span(start=1, logprobs=(-1.0,), turn_id="t", version=name(5), temperature=temperature)
    odd = experience(1, name(5)).model_copy(update={"branch": Branch(token_ids=(1, 2), spans=(span,))})
    decision = decide(odd, None, HISTORY, 5, LIMITS)
    assert decision == Decision("drop", "invalid", replaces=True, detail="temperature")


def test_a_first_token_has_nothing_to_be_predicted_from() -> None:
    branch = Branch(token_ids=(1, 2), spans=(Span(start=0, logprobs=(-1.0,), turn_id="t", version=name(5)),))
    odd = experience(1, name(5)).model_copy(update={"branch": branch})
    assert decide(odd, None, HISTORY, 5, LIMITS) == dropped("invalid")


def test_a_reward_out_of_all_proportion_is_invalid() -> None:
    assert arrives(reward=100.0) == QUEUED
    assert arrives(reward=-101.0) == dropped("invalid")
    assert arrives(reward=1e15) == dropped("invalid"), "the largest number of an event"
    with pytest.raises(ValidationError, match=r"reward\n  must be a number between -1e\+15 and 1e\+15"):
        arrives(reward=1e300)


def test_a_redelivery_is_ignored_whatever_became_of_it() -> None:
    assert arrives(entry(0)) == Decision("ignore")
    assert arrives(entry(0, trained=1.0)) == Decision("ignore")
    assert arrives(entry(0, 1), revision=0) == Decision("ignore")


def test_a_lower_revision_comes_too_late() -> None:
    assert arrives(entry(2), revision=1) == Decision("drop", "superseded")
    assert arrives(entry(2, trained=1.0), revision=1) == Decision("drop", "already_trained")


def test_p10_a_higher_revision_replaces_what_waits() -> None:
    assert arrives(entry(0), revision=1) == QUEUED
    assert arrives(entry(0), revision=1, reward=None) == dropped("withdrawn"), "and still takes the old one with it"


class TestCorrections:
    """Tests of corrections of an experience with reward 1, baseline 0.5 and scale 0.5, and so the trained advantage
    1."""

    def correction(self, reward: float | None, **fields: Any) -> Decision:
        return arrives(entry(0, trained=1.0), revision=1, reward=reward, **fields)

    def missing(self, reward: float | None, entry: Entry) -> float:
        return self.missing_of(reward, entry, HISTORY)

    def missing_of(self, reward: float | None, entry: Entry, history: History) -> float:
        updates = pending_updates_of(self.revised(reward), entry, history, 5, replace(LIMITS, correction_min=0.0))
        return math.fsum(item.advantage or 0.0 for item in updates)

    def revised(self, reward: float | None) -> Experience:
        return experience(1, name(5), revision=1, reward=reward)

    def test_it_adds_what_is_missing(self) -> None:
        assert self.correction(0.0) == QUEUED
        assert self.missing(0.0, entry(0, trained=1.0)) == pytest.approx(-2.0)

    def test_a_withdrawal_takes_back_what_was_trained(self) -> None:
        assert self.correction(None) == QUEUED
        assert self.missing(None, entry(0, trained=1.0)) == pytest.approx(-1.0)

    def test_a_withdrawal_without_tokens_cannot_be_trained(self) -> None:
        assert self.correction(None, branch=False) == dropped("withdrawn")

    def test_nothing_new_is_unchanged(self) -> None:
        assert self.correction(1.0) == dropped("unchanged")
        assert self.correction(1.0 + 0.004) == dropped("unchanged"), "0.008 of advantage, below correction_min"
        assert self.correction(1.0 + 0.006) == QUEUED

    def test_p5_holds_for_corrections_too(self) -> None:
        assert self.correction(0.0, version=1) == dropped("stale")

    def test_contributions_add_up(self) -> None:
        twice = entry(0, trained=1.0)
        twice = twice.model_copy(update={"contributions": (*twice.contributions, Contribution(step=5, advantage=-2.0))})
        assert self.missing(1.0, twice) == pytest.approx(2.0)

    def test_what_an_abandoned_version_learned_counts_as_never_trained(self) -> None:
        abandoned = publish(chain(3), 4, 4).rewind(name(3), 4)  # step 4 is undone
        old = entry(0, trained=1.0, step=4)
        assert self.missing_of(0.0, old, abandoned) == pytest.approx(-1.0)
        assert self.missing_of(None, old, abandoned) == 0.0
        assert self.missing_of(0.0, old, chain(4)) == pytest.approx(-2.0)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def aged(world: World, make: Make, versions: int = 3, **settings: object) -> str:
    """Train `versions` steps on a new lineage, and return the version of its base."""
    await world.run(make(**settings))
    first = world.bus.checkpoints[0].version
    for turn in range(versions):
        newest = world.bus.checkpoints[-1].version
        world.bus.produce(*(experience(100 * turn + n, newest, reward=n % 3) for n in range(50, 54)))
        await world.run(make(**settings))
    assert len(world.bus.checkpoints) == versions + 1
    return first


async def test_on_arrival(world: World, make: Make) -> None:
    first = await aged(world, make, max_staleness=2)
    world.bus.produce(experience(1, first), experience(2, world.bus.checkpoints[1].version))
    await world.run(make(max_staleness=2))
    assert world.bus.fates["e1", 0] == "stale"
    assert ("e2", 0) not in world.bus.fates, "two versions behind is not too old"


async def test_staleness_of_an_unknown_version_is_foreign(world: World, make: Make) -> None:
    await aged(world, make, 1)
    world.bus.produce(experience(1, "m@ffffffffffff"))
    await world.run(make())
    assert world.bus.fates["e1", 0] == "foreign_version"


async def test_while_it_waits(world: World, make: Make) -> None:
    """A single run waits for its group while training on other runs increases its staleness."""
    settings = make(max_staleness=1, advantage={"kind": "grpo"}, group_size=2)
    await world.run(settings)
    first = world.bus.checkpoints[0].version
    world.bus.produce(experience(1, first, task="lonely", run="0"))
    for turn in range(3):
        newest = world.bus.checkpoints[-1].version
        world.bus.produce(*(experience(10 * turn + n, newest, n, task=f"t{turn}", run=str(n)) for n in range(10, 14)))
        await world.run(settings)
        assert world.bus.fates.get(("e1", 0)) == (None if turn == 0 else "stale")


async def test_after_a_restart(world: World, make: Make) -> None:
    """Admitted experiences are checked again, since the bound may have been lowered or the saved state be older."""
    first = await aged(world, make, 2, max_staleness=9)
    world.bus.produce(experience(1, first), experience(2, first, reward=None))
    await world.run(make(max_staleness=9))
    lineage = open_lineage(make(max_staleness=1), world.blobs, world.clock)
    assert [item.experience.experience_id for item in lineage.state.waiting] == ["e1"]
    assert lineage.next_batch() == ()
    assert lineage.state.waiting == ()
    assert [(v.experience_id, v.dropped) for v in lineage.state.outcomes] == [("e1", "stale")]


async def test_a_correction_of_something_too_old(world: World, make: Make) -> None:
    first = await aged(world, make, 1, max_staleness=1)
    del first
    trained = next(verdict.experience_id for verdict in world.bus.verdicts)
    await more(world, make)
    number = int(trained[1:])
    world.bus.produce(experience(number, world.bus.checkpoints[0].version, -5.0, revision=1))
    await world.run(make(max_staleness=1))
    assert world.bus.fates[trained, 1] == "stale"


async def more(world: World, make: Make) -> None:
    newest = world.bus.checkpoints[-1].version
    world.bus.produce(*(experience(900 + n, newest, reward=n % 3) for n in range(4)))
    await world.run(make(max_staleness=1))


async def test_nothing_is_trained_when_all_would_be_dropped(world: World, make: Make) -> None:
    first = await aged(world, make, 3, max_staleness=2)
    world.bus.produce(*(experience(n, first) for n in range(8)))
    await world.run(make(max_staleness=2))
    assert len(world.bus.checkpoints) == 4
    assert [world.bus.fates[f"e{n}", 0] for n in range(8)] == ["stale"] * 8


async def test_the_trainer_cannot_run_ahead_of_what_is_served(world: World, make: Make) -> None:
    """If the served version does not change, training stops once the staleness bound is reached."""
    await world.run(make(max_staleness=2))
    first = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, first, reward=n % 3) for n in range(40)))
    await world.run(make(max_staleness=2))
    assert [checkpoint.step for checkpoint in world.bus.checkpoints] == [0, 1, 2, 3]
    assert list(world.bus.fates.values()) == ["trained"] * 12 + ["stale"] * 28


async def test_going_back_makes_the_champions_experiences_fresh_again(world: World, make: Make) -> None:
    first = await aged(world, make, 3, max_staleness=2)
    second = world.bus.checkpoints[1].version
    world.bus.produce(decision(second, "rejected", first), experience(1, first), experience(2, second))
    await world.run(make(max_staleness=2, batch_experiences=64), per_poll=1)
    assert ("e1", 0) not in world.bus.fates
    assert ("e2", 0) not in world.bus.fates


async def test_the_batch_itself_refuses_what_is_too_old(world: World, make: Make) -> None:
    """A batch with a stale experience cannot be built either."""
    first = await aged(world, make, 2, max_staleness=9)
    world.bus.produce(*(experience(n, first) for n in range(3)), experience(9, first, reward=None))
    await world.run(make(max_staleness=9))
    lineage: Lineage = open_lineage(make(max_staleness=1), world.blobs, world.clock)
    settings = make().advantage
    with pytest.raises(AssertionError, match="stale"):
        prepare(lineage.state.waiting, lineage.state, settings, lineage._decay)
