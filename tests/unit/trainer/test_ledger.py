"""P4 and P10 under any order of arrivals, steps, versions and refusals."""

from __future__ import annotations

import math
import random
from collections import Counter
from datetime import timedelta

import pytest

from headrace_schemas.blobs import BlobRef
from headrace_trainer.admission import Limits
from headrace_trainer.baselines import Decay
from headrace_trainer.history import History, Published
from headrace_trainer.ledger import Ledger
from headrace_trainer.prepare import prepare
from headrace_trainer.settings import AdvantageSettings, MemorySettings
from headrace_trainer.waiting import Waiting
from tests.unit.trainer.test_history import chain, name, publish
from tests.unit.trainer.world import START, experience

LIMITS = Limits(
    vocabulary=320, sequence_tokens=99, max_staleness=2, reward_max=1e6, advantage_max=10.0, correction_min=1e-3
)
DECAY = Decay(task=0.9, model=0.99, tasks_max=9)
REF = BlobRef(uri="file:///x", sha256="0" * 64, size=1)


def ledger_on(history: History, steps: int = 0, **memory: int) -> Ledger:
    return Ledger(history, LIMITS, MemorySettings(**memory), steps=steps)


def step(ledger: Ledger) -> None:
    """Train everything that waits."""
    ledger.sweep()
    prepared = prepare(ledger.waiting, ledger, AdvantageSettings(), DECAY)
    if prepared.trained:
        ledger.stepped(prepared.trained, prepared.baselines)


def test_a_late_lower_revision_does_not_touch_the_higher_one_that_waits() -> None:
    ledger = ledger_on(chain(0))
    ledger.admit(experience(1, name(0), revision=2), (0, 0), START)
    ledger.admit(experience(1, name(0), revision=1), (0, 1), START)
    assert [item.experience.revision for item in ledger.waiting] == [2]
    assert [(verdict.revision, verdict.dropped) for verdict in ledger.verdicts] == [(1, "superseded")]


def test_tokens_that_wait_are_counted() -> None:
    ledger = ledger_on(chain(0), queue_tokens=8192 + 30, sequence_tokens=8192)
    ledger.admit(experience(1, name(0), length=40), (0, 0), START)
    ledger.admit(experience(1, name(0), length=20, revision=1), (0, 1), START)
    assert ledger.room == 1023
    for number in range(2, 500):
        ledger.admit(experience(number, name(0), length=40), (0, number), START)
    assert ledger.room == 0
    step(ledger)
    assert ledger.room == 1024


def test_a_queue_that_was_larger_when_it_was_saved_has_no_room() -> None:
    saved = [Waiting(experience=experience(number, name(0), length=40), since_ms=0) for number in range(2)]

    def room(**memory: int) -> int:
        return Ledger(chain(0), LIMITS, MemorySettings(**memory), waiting=saved).room

    assert [room(queue_experiences=count) for count in (1, 2, 3)] == [0, 0, 1]
    assert room(queue_experiences=3, queue_tokens=80) == 0, "their tokens are counted from the beginning"
    assert room(queue_experiences=3, queue_tokens=81) == 1


def test_what_was_read_is_noted_by_stretches_and_the_next_place_of_every_partition() -> None:
    ledger = ledger_on(chain(0))
    for topic, partition, offset, noted in (
        ("experiences", 0, 3, True), ("experiences", 0, 4, True), ("experiences", 1, 7, True), ("other", 0, 9, False),
        ("experiences", 1, 8, True), ("experiences", 0, 5, True),
    ):  # fmt: skip
        ledger.passed(topic, partition, offset, noted=noted)
    assert ledger.offsets == {"experiences": {0: 6, 1: 9}, "other": {0: 10}}
    assert [(read.partition, read.until) for read in ledger.read] == [(0, 5), (1, 9), (0, 6)]


def test_a_new_lineage_is_at_its_first_version_until_it_steps() -> None:
    ledger = Ledger(chain(0), LIMITS, MemorySettings())
    assert (ledger.steps, ledger.current, ledger.promoted) == (0, name(0), (name(0),))
    ledger.admit(experience(1, name(0)), (0, 0), START)
    step(ledger)
    assert (ledger.steps, ledger.current, ledger.promoted) == (1, None, (name(0),))


def test_what_could_change_the_weights_again_is_never_forgotten() -> None:
    """Not even when it is only fresh for the champion that the weights may go back to."""
    ledger = ledger_on(chain(1), steps=1, window_experiences=1)
    ledger.admit(experience(1, name(1)), (0, 0), START)
    step(ledger)
    ledger.promoted = (name(1), name(0))
    for number in range(2, 6):
        ledger.history = publish(ledger.history, number, ledger.steps)
    ledger.admit(experience(2, name(5), reward=None), (0, 1), START)
    ledger.admit(experience(3, name(5), reward=None), (0, 2), START)
    ledger.forget(START + timedelta(days=999))
    assert list(ledger.window) == ["e1"], "version 1 is four edges away, but it is the champion"
    ledger.promoted = (name(5), name(4))
    ledger.forget(START)
    assert ledger.window.get("e1") is not None, "within the count it stays anyway"
    ledger.admit(experience(4, name(5), reward=None), (0, 3), START)
    ledger.forget(START)
    assert ledger.window.get("e1") is None


class Life:
    """A random stream: at each turn something arrives, or is trained, published or refused."""

    def __init__(self, seed: int, *, refusals: bool) -> None:
        self.draw = random.Random(seed)
        self.ledger = ledger_on(chain(0))
        self.sent: dict[tuple[str, int], float | None] = {}
        self.refusals = refusals

    def run(self, turns: int) -> None:
        for turn in range(turns):
            what = self.draw.random()
            if what < 0.75:
                self.arrive(turn)
            elif what < 0.9:
                step(self.ledger)
            elif what < 0.95 or not self.refusals:
                self.publish()
            else:
                target = self.draw.choice(self.ledger.history.versions[-3:]).version
                self.ledger.history = self.ledger.history.moved(target, self.ledger.steps)
                self.ledger.sweep()

    def arrive(self, turn: int) -> None:
        number, revision = self.draw.randrange(6), self.draw.randrange(5)
        key = (f"e{number}", revision)
        reward = self.sent.setdefault(key, self.draw.choice([None, 0.0, 0.5, 1.0, 2.0]))
        event = experience(number, name(0), reward, revision=revision, task="t")
        self.ledger.admit(event, (0, turn), START)

    def publish(self) -> None:
        if self.ledger.current is None:
            published = Published(
                version=name(self.ledger.history.next_number),
                parent=self.ledger.history.head,
                number=self.ledger.history.next_number,
                manifest=REF,
                first_step=self.ledger.history.head_step + 1,
                last_step=self.ledger.steps,
            )
            self.ledger.history = self.ledger.history.published(published, {name(0)}, 100)


@pytest.mark.parametrize("refusals", [False, True])
def test_every_revision_has_one_verdict_or_waits(refusals: bool) -> None:
    for _ in range(60):
        seed = random.SystemRandom().randrange(2**32)
        life = Life(seed, refusals=refusals)
        life.run(80)
        ledger = life.ledger
        judged = Counter((verdict.experience_id, verdict.revision) for verdict in ledger.verdicts)
        waiting = {(item.experience.experience_id, item.experience.revision) for item in ledger.waiting}
        assert set(judged.values()) <= {1}, f"seed {seed}: two verdicts"
        assert not waiting & judged.keys(), f"seed {seed}: judged and still waiting"
        assert waiting | judged.keys() == life.sent.keys(), f"seed {seed}: lost"
        trained = Counter(verdict.experience_id for verdict in ledger.verdicts if verdict.dropped is None)
        for name_, count in trained.items():
            entry = ledger.window.get(name_)
            assert entry is not None
            assert len(entry.contributions) == count, f"seed {seed}: {name_} has changed the weights unaccounted for"


def test_the_weights_hold_the_last_verdict_however_it_came_to_be() -> None:
    """Without refusals: the contributions add up to the advantage of the highest revision that was not too old."""
    for _ in range(60):
        seed = random.SystemRandom().randrange(2**32)
        life = Life(seed, refusals=False)
        life.run(80)
        step(life.ledger)
        last: dict[str, int] = {}
        for verdict in life.ledger.verdicts:
            if verdict.dropped in {None, "unchanged"}:
                last[verdict.experience_id] = max(last.get(verdict.experience_id, -1), verdict.revision)
        for name_, revision in last.items():
            entry = life.ledger.window.get(name_)
            assert entry is not None
            held = math.fsum(contribution.advantage for contribution in entry.contributions)
            wanted = entry.advantage_of(life.sent[name_, revision], LIMITS.advantage_max)
            assert held == pytest.approx(wanted, abs=2e-3), f"seed {seed}: {name_}"
