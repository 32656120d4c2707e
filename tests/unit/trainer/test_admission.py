"""Decisions about arriving experiences: one row of the table for each case."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from headrace_schemas import Branch, Experience, Span
from headrace_schemas.events.chat import SAMPLED_TEMPERATURE_MIN
from headrace_trainer.experiences.admission import AdmissionLimits, Decision, decide, pending_updates_of
from headrace_trainer.experiences.history import History
from headrace_trainer.experiences.window import Contribution, Entry
from tests.unit.trainer.test_history import chain, name, publish
from tests.unit.trainer.world import experience

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
    """The experience was trained with reward 1, baseline 0.5 and scale 0.5: advantage 1."""

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
        abandoned = publish(chain(3), 4, 4).rewound(name(3), 4)  # step 4 is undone
        old = entry(0, trained=1.0, step=4)
        assert self.missing_of(0.0, old, abandoned) == pytest.approx(-1.0)
        assert self.missing_of(None, old, abandoned) == 0.0
        assert self.missing_of(0.0, old, chain(4)) == pytest.approx(-2.0)
