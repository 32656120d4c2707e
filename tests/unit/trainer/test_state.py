"""Tests of the lineage state under any order of arrivals, steps, versions and refusals (P4, P10), and of its cost."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from datetime import timedelta
from pathlib import Path

import pytest
from prometheus_client import REGISTRY

from headrace_schemas import (
    Branch,
    Experience,
    RestoredOutcome,
    RevertedOutcome,
    Span,
    TrainingMetrics,
    TrainingOutcome,
)
from headrace_schemas.events.trajectory import PreferenceSide, TurnReward
from headrace_schemas.values.blobs import BlobRef
from headrace_trainer.algorithms.baselines import Decay
from headrace_trainer.algorithms.presets import Signals
from headrace_trainer.algorithms.settings import AdvantageSettings
from headrace_trainer.batches.prepare import prepare
from headrace_trainer.experiences.admission import AdmissionLimits
from headrace_trainer.experiences.history import History, PublishedVersion
from headrace_trainer.experiences.replies import ReplyReader
from headrace_trainer.experiences.reports import UnreportedOutcomes
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.waiting import WaitingExperience
from headrace_trainer.settings import MemorySettings
from tests.support.presence import draw_seed
from tests.unit.trainer.test_history import chain, name, publish
from tests.unit.trainer.world import START, experience

LIMITS = AdmissionLimits(
    vocabulary=320, sequence_tokens=99, max_staleness=2, reward_max=1e6, advantage_max=10.0, correction_min=1e-3
)
DECAY = Decay(task=0.9, model=0.99, tasks_max=9)
REF = BlobRef(uri="file:///x", sha256="0" * 64, size=1)


def ledger_on(history: History, steps: int = 0, **memory: int) -> LineageState:
    return LineageState(history, LIMITS, MemorySettings(**memory), steps=steps)


def step(state: LineageState) -> None:
    """Train all waiting experiences."""
    state.sweep()
    prepared = prepare(state.waiting, state, AdvantageSettings(), DECAY)
    if prepared.trained:
        state.record_step(prepared.trained, prepared.baselines)


def test_a_late_lower_revision_does_not_touch_the_higher_one_that_waits() -> None:
    state = ledger_on(chain(0))
    state.admit(experience(1, name(0), revision=2), (0, 0), START)
    state.admit(experience(1, name(0), revision=1), (0, 1), START)
    assert [item.experience.revision for item in state.waiting] == [2]
    assert [(outcome.revision, outcome.dropped) for outcome in state.outcomes] == [(1, "superseded")]


def test_tokens_that_wait_are_counted() -> None:
    state = ledger_on(chain(0), queue_tokens=8192 + 30, sequence_tokens=8192)
    state.admit(experience(1, name(0), length=40), (0, 0), START)
    state.admit(experience(1, name(0), length=20, revision=1), (0, 1), START)
    assert state.room == 1023
    for number in range(2, 500):
        state.admit(experience(number, name(0), length=40), (0, number), START)
    assert state.room == 0
    step(state)
    assert state.room == 1024


def measured(metric: str, **labels: str) -> float:
    """Return the value of a counter, or 0 before its first increment."""
    return REGISTRY.get_sample_value(f"headrace_trainer_{metric}", labels) or 0.0


def test_what_waits_is_gauged_to_the_token() -> None:
    state = ledger_on(chain(0))
    gauges: list[tuple[float, float]] = []

    def note() -> None:
        gauges.append((measured("waiting_experiences"), measured("waiting_tokens")))

    state.admit(experience(1, name(0), length=40), (0, 0), START)
    note()
    state.admit(experience(1, name(0), length=20, revision=1), (0, 1), START)
    note()
    state.admit(experience(2, name(0), length=30), (0, 2), START)
    note()
    late = state.waiting[0]
    for _ in range(2):  # what does not wait changes nothing
        state.drop(late, "stale")
        note()
    assert gauges == [(1, 40), (1, 20), (2, 50), (1, 30), (1, 30)]


def test_what_became_of_revisions_is_counted() -> None:
    kinds = [
        ("trained_total", {}), ("duplicates_total", {}),
        *(("dropped_total", {"reason": reason}) for reason in ("stale", "unpaired", "singleton")),
        *(("undone_total", {"queued": queued}) for queued in ("true", "false")),
    ]  # fmt: skip
    before = [measured(metric, **labels) for metric, labels in kinds]
    state = ledger_on(chain(0))
    for number in range(4):
        state.admit(experience(number, name(0)), (0, number), START)
    state.admit(experience(0, name(0)), (0, 0), START)
    state.drop(state.waiting[0], "stale")
    state.drop(state.waiting[0], "singleton", "unpaired")
    step(state)
    state.record_reversal("e2", (0, 1, 2), 2)
    after = [measured(metric, **labels) for metric, labels in kinds]
    assert [new - old for new, old in zip(after, before, strict=True)] == [2, 1, 1, 1, 0, 1, 2]


def test_a_queue_that_was_larger_when_it_was_saved_has_no_room() -> None:
    saved = [WaitingExperience(experience=experience(number, name(0), length=40), since_ms=0) for number in range(2)]

    def room_with(**memory: int) -> int:
        return LineageState(chain(0), LIMITS, MemorySettings(**memory), waiting=saved).room

    assert [room_with(queue_experiences=count) for count in (1, 2, 3)] == [0, 0, 1]
    assert room_with(queue_experiences=3, queue_tokens=80) == 0, "their tokens are counted from the beginning"
    assert room_with(queue_experiences=3, queue_tokens=81) == 1


def test_what_was_read_is_noted_by_stretches_and_the_next_place_of_every_partition() -> None:
    state = ledger_on(chain(0))
    for topic, partition, offset, reported in (
        ("experiences", 0, 3, True), ("experiences", 0, 4, True), ("experiences", 1, 7, True), ("other", 0, 9, False),
        ("experiences", 1, 8, True), ("experiences", 0, 5, True),
    ):  # fmt: skip
        state.record_offset(topic, partition, offset, reported=reported)
    assert state.offsets == {"experiences": {0: 6, 1: 9}, "other": {0: 10}}
    assert [(read.partition, read.until) for read in state.read] == [(0, 5), (1, 9), (0, 6)]


def test_a_new_lineage_is_at_its_first_version_until_it_steps() -> None:
    state = LineageState(chain(0), LIMITS, MemorySettings())
    assert (state.steps, state.current, state.promoted) == (0, name(0), (name(0),))
    state.admit(experience(1, name(0)), (0, 0), START)
    step(state)
    assert (state.steps, state.current, state.promoted) == (1, None, (name(0),))


def test_what_a_save_that_failed_reports_comes_before_what_was_said_since() -> None:
    state = ledger_on(chain(0))
    for number in range(4):
        state.admit(experience(number, name(0)), (0, number), START)
    first, second, third, last = state.waiting
    state.drop(first, "stale")
    state.drop(second, "stale")
    reported = state.take_report()
    assert [outcome.experience_id for outcome in reported.outcomes] == ["e0", "e1"]
    state.drop(third, "stale")
    state.drop(last, "stale")
    assert [outcome.experience_id for outcome in state.outcomes] == ["e2", "e3"]
    state.put_back(reported)
    assert [outcome.experience_id for outcome in state.outcomes] == ["e0", "e1", "e2", "e3"]


def test_what_could_change_the_weights_again_is_never_forgotten() -> None:
    """A stale experience stays dropped, even if it is fresh for the champion that the weights may return to."""
    state = ledger_on(chain(1), steps=1, window_experiences=1)
    state.admit(experience(1, name(1)), (0, 0), START)
    step(state)
    state.promoted = (name(1), name(0))
    for number in range(2, 6):
        state.history = publish(state.history, number, state.steps)
    state.admit(experience(2, name(5), reward=None), (0, 1), START)
    state.admit(experience(3, name(5), reward=None), (0, 2), START)
    state.evict_old_entries(START + timedelta(days=999))
    assert list(state.window) == ["e1"], "version 1 is four edges away, but it is the champion"
    state.promoted = (name(5), name(4))
    state.evict_old_entries(START)
    assert state.window.get("e1") is not None, "within the count it stays anyway"
    state.admit(experience(4, name(5), reward=None), (0, 3), START)
    state.evict_old_entries(START)
    assert state.window.get("e1") is None


def test_what_is_just_fresh_enough_to_be_trained_again_is_kept() -> None:
    state = ledger_on(chain(0), window_experiences=1)
    for number in range(3):
        state.admit(experience(number, name(number)), (0, number), START)
        step(state)
        state.history = publish(state.history, number + 1, state.steps)
    state.promoted = (name(3),)
    state.evict_old_entries(START)
    assert list(state.window) == ["e1", "e2"], "two edges back is the limit, three is not"


class Life:
    """Random stream of arrivals, training steps, publications and refused versions."""

    def __init__(self, seed: int, *, refusals: bool) -> None:
        self.draw = random.Random(seed)
        self.state = ledger_on(chain(0))
        self.sent: dict[tuple[str, int], float | None] = {}
        self.refusals = refusals

    def run(self, turns: int) -> None:
        for turn in range(turns):
            choice = self.draw.random()
            if choice < 0.75:
                self.arrive(turn)
            elif choice < 0.9:
                step(self.state)
            elif choice < 0.95 or not self.refusals:
                self.publish()
            else:
                target = self.draw.choice(self.state.history.versions[-3:]).version
                self.state.history = self.state.history.rewind(target, self.state.steps)
                self.state.sweep()

    def arrive(self, turn: int) -> None:
        number, revision = self.draw.randrange(6), self.draw.randrange(5)
        key = (f"e{number}", revision)
        reward = self.sent.setdefault(key, self.draw.choice([None, 0.0, 0.5, 1.0, 2.0]))
        event = experience(number, name(0), reward, revision=revision, task="t")
        self.state.admit(event, (0, turn), START)

    def publish(self) -> None:
        if self.state.current is None:
            published = PublishedVersion(
                version=name(self.state.history.next_number),
                parent=self.state.history.head,
                number=self.state.history.next_number,
                manifest=REF,
                first_step=self.state.history.head_step + 1,
                last_step=self.state.steps,
            )
            self.state.history = self.state.history.with_version(published, {name(0)}, 100)


@pytest.mark.parametrize("refusals", [False, True])
def test_every_revision_has_one_outcome_or_waits(refusals: bool) -> None:
    for seed in random.Random(draw_seed()).sample(range(2**32), 60):
        life = Life(seed, refusals=refusals)
        life.run(80)
        state = life.state
        judged = Counter((outcome.experience_id, outcome.revision) for outcome in state.outcomes)
        waiting = {(item.experience.experience_id, item.experience.revision) for item in state.waiting}
        assert set(judged.values()) <= {1}, f"seed {seed}: two outcomes"
        assert not waiting & judged.keys(), f"seed {seed}: judged and still waiting"
        assert waiting | judged.keys() == life.sent.keys(), f"seed {seed}: lost"
        trained = Counter(outcome.experience_id for outcome in state.outcomes if outcome.dropped is None)
        for name_, count in trained.items():
            entry = state.window.get(name_)
            assert entry is not None
            assert len(entry.contributions) == count, f"seed {seed}: {name_} has changed the weights unaccounted for"


def test_the_weights_hold_the_last_outcome_however_it_came_to_be() -> None:
    """Without refusals, the contributions add up to the advantage of the highest revision that was not stale."""
    for seed in random.Random(draw_seed()).sample(range(2**32), 60):
        life = Life(seed, refusals=False)
        life.run(80)
        step(life.state)
        last: dict[str, int] = {}
        for outcome in life.state.outcomes:
            if outcome.dropped in {None, "unchanged"}:
                last[outcome.experience_id] = max(last.get(outcome.experience_id, -1), outcome.revision)
        for name_, revision in last.items():
            entry = life.state.window.get(name_)
            assert entry is not None
            held_advantage = math.fsum(contribution.advantage for contribution in entry.contributions)
            expected_advantage = entry.advantage_of(life.sent[name_, revision], LIMITS.advantage_max)
            assert held_advantage == pytest.approx(expected_advantage, abs=2e-3), f"seed {seed}: {name_}"


@pytest.mark.parametrize(("outcomes", "undone", "restored"), [(0, 65_537, 0), (65_537, 140_000, 1), (3, 0, 131_073)])
def test_an_account_takes_what_fits_and_the_rest_follows_in_order(outcomes: int, undone: int, restored: int) -> None:
    """Reversals and restorations are never reported before outcomes of earlier steps."""
    state = ledger_on(chain(0))
    state.outcomes += [TrainingOutcome(experience_id=f"o{n}", revision=0, turn_ids=()) for n in range(outcomes)]
    state.undone += [RevertedOutcome(experience_id=f"u{n}", revision=0, queued=False) for n in range(undone)]
    state.restored += [RestoredOutcome(experience_id=f"r{n}", revision=0) for n in range(restored)]
    events: list[str] = []
    accounts = 0
    while state.has_reversals or state.outcomes:
        account = state.take_report()
        accounts += 1
        TrainingMetrics(
            time=START,
            model="m",
            lineage="main",
            step=0,
            verdicts=account.outcomes,
            undone=account.undone,
            restored=account.restored,
        )
        for entries in (account.outcomes, account.undone, account.restored):
            events += [entry.experience_id for entry in entries]
        left = state.snapshot()["unreported"]
        assert left == UnreportedOutcomes(
            outcomes=tuple(state.outcomes), undone=tuple(state.undone), restored=tuple(state.restored)
        )
    assert accounts < 5
    assert len(events) == len(set(events)) == outcomes + undone + restored
    for letter, count in (("o", outcomes), ("u", undone), ("r", restored)):
        assert [event for event in events if event[0] == letter] == [f"{letter}{n}" for n in range(count)]
    assert all(event[0] == "o" for event in events[:outcomes])


SPANS_MAX, SIDES_MAX = 4096, 256
VERSION = name(1)


def with_branch(branch: Branch) -> Experience:
    """Return an experience of `branch` with as many signals as an event may hold."""
    turns = branch.turn_ids
    update = {
        "branch": branch,
        "turn_rewards": tuple(TurnReward(turn_id=turn, value=0.0) for turn in turns),
        "preferences": tuple(
            PreferenceSide(turn_id=turn, preference_id=f"preference-{turn}", side="chosen")
            for turn in turns[-SIDES_MAX:]
        ),
    }
    return experience(1, VERSION).model_copy(update=update)


def many_answers() -> Branch:
    spans = tuple(
        Span(start=2 * index + 1, logprobs=(-1.0,), turn_id=f"turn-{index}", version=VERSION)
        for index in range(SPANS_MAX)
    )
    return Branch(token_ids=(2,) * (2 * SPANS_MAX + 1), spans=spans)


def test_the_examples_of_the_largest_experience_take_linear_time(base: Path) -> None:
    limits = AdmissionLimits(
        vocabulary=320,
        sequence_tokens=40_000,
        max_staleness=2,
        reward_max=100.0,
        advantage_max=10.0,
        correction_min=0.01,
        signals=Signals(preferences=True, replies=True),
        replies=ReplyReader(base, 0.2, 0.8),
    )
    largest = with_branch(many_answers())
    began_s = time.process_time()
    assert limits.examples(largest)
    assert time.process_time() - began_s < 2.0, "it took 75 s when each answer was searched among all spans"
