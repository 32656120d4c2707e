"""Promises about the stream, with edits and preferences in it. Each function counts violations."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from headrace_schemas import Experience
from headrace_trainer.algorithms.baselines import Decay
from headrace_trainer.algorithms.presets import Signals
from headrace_trainer.algorithms.settings import AdvantageSettings, LossSettings
from headrace_trainer.batches.prepare import PreparedBatch, prepare
from headrace_trainer.experiences.admission import AdmissionLimits
from headrace_trainer.experiences.examples import CorrectionRules
from headrace_trainer.experiences.history import History
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.experiences.templates import EditWriter
from headrace_trainer.experiences.waiting import form_parties
from headrace_trainer.settings import MemorySettings
from tests.unit.trainer.test_history import chain, name
from tests.unit.trainer.world import START, WORDS, edit, side, turn, with_signals

DECAY = Decay(task=0.9, model=0.99, tasks_max=99)
SFT = Signals(rewards=False, written=True, edits=True)
DPO = Signals(rewards=False, edits=True, replaced=True, preferences=True, paired=True)
KTO = Signals(rewards=False, edits=True, replaced=True, preferences=True)


@dataclass
class Stream:
    """A lineage's state without weights, to which experiences come."""

    base: Path
    signals: Signals
    kind: str
    seed: int = 0
    history: History | None = None

    def __post_init__(self) -> None:
        self.draw = random.Random(self.seed)
        limits = AdmissionLimits(
            vocabulary=320,
            sequence_tokens=99,
            max_staleness=2,
            reward_max=1e6,
            advantage_max=10.0,
            correction_min=1e-3,
            signals=self.signals,
            logprobs=False,
            correction_rules=CorrectionRules(10.0, 1e-3),
            write=EditWriter(self.base),
        )
        self.state = LineageState(self.history or chain(0), limits, MemorySettings())
        self.settings = AdvantageSettings(kind=self.kind)
        self.offset = 0
        self.batches: list[PreparedBatch] = []

    def send(self, *events: Experience) -> None:
        for event in events:
            self.state.admit(event, (0, self.offset), START)
            self.offset += 1

    def train(self, waited_s: float = 0.0) -> PreparedBatch | None:
        """All possible feedback."""
        self.state.sweep()
        items = self.state.waiting
        if self.signals.paired:
            now = START + timedelta(seconds=waited_s)
            parties = form_parties(
                items, timedelta(seconds=300), now, self.state.open_answers, self.state.has_corrections
            )
            for item in parties.unpaired:
                self.state.drop(item, "singleton", "unpaired")
            items = parties.ready
        if not items:
            return None
        loss = LossSettings(agg_mode="seq-mean-token-sum")
        prepared = prepare(items, self.state, self.settings, DECAY, loss=loss)
        self.batches.append(prepared)
        # Slopes as a loss would have them, so that what is taken back has to come with its own.
        trained = [replace(row, factor=self.draw.uniform(0.1, 1)) for row in prepared.trained]
        self.state.record_step(trained, prepared.baselines, 0.01)
        return prepared

    def held_by_weights(self) -> dict[tuple[str, str], float]:
        """Return the content of the weights: for each example the weighted sum of its contributions."""
        sums: dict[tuple[str, str], float] = {}
        for experience_id in self.state.window:
            entry = self.state.window.get(experience_id)
            for contribution in entry.contributions if entry else ():
                key = (experience_id, contribution.part)
                sums[key] = sums.get(key, 0.0) + contribution.advantage * contribution.token_weight
        return {key: value for key, value in sums.items() if abs(value) > 1e-9}


def revisions(draw: random.Random, number: int) -> list[Experience]:
    """One experience as it is revised: edits and sides come, change and are withdrawn. Its partner is the next one."""
    pair, which = f"p{number // 2}", ("chosen", "rejected")[number % 2]
    events = []
    for revision in range(draw.randint(1, 4)):
        edits = tuple(edit(draw.choice(WORDS), turn(number)) for _ in range(draw.choice((0, 0, 1, 1, 2))))
        sides = (side(pair, which, turn(number)),) if draw.random() < 0.7 else ()  # type: ignore[arg-type]
        events.append(with_signals(number, name(0), edits=edits, preferences=sides, revision=revision))
    return events


def wrong_in_the_end(base: Path, signals: Signals, kind: str, seed: int) -> int:
    """Count examples that the weights hold in another revision than the last, after revisions in any order, some
    twice, with steps in between. Sides of a preference are trained with their partners, so only sides that agree
    with their partner are compared.
    """
    draw = random.Random(seed)
    stream = Stream(base, signals, kind, seed)
    histories = [revisions(draw, number) for number in range(8)]
    events = [event for several in histories for event in several]
    draw.shuffle(events)
    for event in events + draw.sample(events, 5):
        stream.send(event)
        if draw.random() < 0.4:
            stream.train()
    for _ in range(3):
        stream.train(waited_s=301)
    sums = stream.held_by_weights()
    wrong = 0
    for several in histories:
        last = max(several, key=lambda example: example.revision)
        expected = {example.part: example.value for example in stream.state.limits.examples(last)}
        for part in {*expected, *(part for experience, part in sums if experience == last.experience_id)}:
            value = sums.get((last.experience_id, part), 0.0)
            target = expected.get(part) or 0.0
            alone = signals.paired and part.startswith("preference/") and value == 0.0
            wrong += not (alone or (target > 0) - (target < 0) == (value > 0) - (value < 0))
    return wrong


def trained_twice(base: Path, seed: int) -> int:
    """P4: the same records again, after they were trained."""
    stream = Stream(base, SFT, "demonstrations", seed)
    events = [with_signals(number, name(0), edits=(edit(WORDS[number], turn(number)),)) for number in range(5)]
    stream.send(*events, *events)
    first = stream.train()
    stream.send(*events)
    again = stream.train()
    return abs(len(first.batch.rows) - 5 if first else 5) + (len(again.batch.rows) if again else 0)


def other_bytes(base: Path, signals: Signals, kind: str, seed: int) -> int:
    """P9: count differences when the same records are read again, whatever else is in the process."""

    def digests() -> list[str]:
        draw = random.Random(seed)
        stream = Stream(base, signals, kind, seed)
        for number in range(8):
            for event in revisions(draw, number):
                stream.send(event)
            stream.train()
        stream.train(waited_s=301)
        return [step.batch.digest() for step in stream.batches]

    first = digests()
    return int(first != digests()) + int(not first)


def tokens_made_anew(base: Path, seed: int) -> int:
    """P2: count rows with a prompt or answer that differs from the branch's tokens, or with a loss at other tokens."""
    stream, wrong = Stream(base, DPO, "preferences", seed), 0
    spans = [name(0), name(0), name(0)]
    first = with_signals(1, name(0), versions=spans, length=17, preferences=(side("p", "chosen", turn(1, 1)),))
    other = with_signals(2, name(0), versions=spans, length=17, preferences=(side("p", "rejected", turn(2, 2)),))
    edited = with_signals(3, name(0), versions=spans, length=17, edits=(edit("nobody", turn(3, 1)),))
    stream.send(first, other, edited)
    prepared = stream.train()
    assert prepared is not None
    rows = {row.name.split("/")[0]: row for row in prepared.batch.rows}
    for key, event, index, written in (
        ("e1#preference", first, 1, False), ("e2#preference", other, 2, False),
        ("e3#replaced", edited, 1, False), ("e3#edit", edited, 1, True),
    ):  # fmt: skip
        assert event.branch is not None
        span, row = event.branch.spans[index], rows[key]
        token_ids = list(event.branch.token_ids)
        wrong += row.token_ids_T[: span.start].tolist() != token_ids[: span.start]
        wrong += row.loss_mask_T[: span.start].any() or not row.loss_mask_T[span.start :].all()
        wrong += row.written != written
        if not written:
            wrong += row.token_ids_T.tolist() != token_ids[: span.stop]
            wrong += row.behaviour_T[span.start :].tolist() != list(span.logprobs)
    return int(wrong)


def wrong_sides(base: Path, seed: int) -> int:
    """Check that chosen answers have the advantage 1, rejected ones -1, and that both stay with their partners."""
    stream = Stream(base, DPO, "preferences", seed)
    for number in range(0, 6, 2):
        chosen = side(f"p{number}", "chosen", turn(number))
        rejected = side(f"p{number}", "rejected", turn(number + 1))
        stream.send(
            with_signals(number, name(0), preferences=(chosen,)),
            with_signals(number + 1, name(0), preferences=(rejected,)),
        )
    prepared = stream.train()
    assert prepared is not None
    wrong = abs(len(prepared.batch.rows) - 6)
    for row in prepared.batch.rows:
        number = int(row.experience_id[1:])
        wrong += float(row.advantage) != (1.0 if number % 2 == 0 else -1.0)
        wrong += not row.together.endswith(f"/p{number - number % 2}")
    return wrong


def tenants_that_met(base: Path, seed: int) -> int:
    """Preferences of two tenants with one name."""
    stream = Stream(base, DPO, "preferences", seed)
    stream.send(
        with_signals(1, name(0), preferences=(side("p", "chosen", turn(1)),), tenant="a"),
        with_signals(2, name(0), preferences=(side("p", "rejected", turn(2)),), tenant="b"),
    )
    prepared = stream.train(waited_s=301)
    details = [outcome.detail for outcome in stream.state.outcomes]
    return (len(prepared.batch.rows) if prepared else 0) + (details != ["unpaired", "unpaired"])


def outcomes_that_are_wrong(base: Path, seed: int) -> int:
    """P5 and P6: check that stale, signalless and vainly waiting experiences end with these outcomes, and none as a
    zero.
    """
    old = Stream(base, SFT, "demonstrations", seed, chain(5))
    old.send(
        with_signals(1, name(1), edits=(edit("nobody", turn(1)),)),
        with_signals(2, name(1), origin="written"),
        with_signals(3, name(5), reward=1.0),
        with_signals(4, name(5), edits=(edit("<|im_end|>", turn(4)),)),
        with_signals(5, name(5), edits=(edit("nobody", turn(5)),)),
        with_signals(6, "m@ffffffffffff", edits=(edit("nobody", turn(6)),)),
    )
    old.train()
    outcomes = {outcome.experience_id: (outcome.dropped, outcome.detail) for outcome in old.state.outcomes}
    expected = {
        "e1": ("stale", None),
        "e2": (None, None),
        "e3": ("no_reward", "no_signal"),
        "e4": ("invalid", "edit"),
        "e5": (None, None),
        "e6": ("foreign_version", None),
    }
    plain = Stream(base, Signals(), "reinforce++", seed)
    plain.state.limits = replace(plain.state.limits, logprobs=True)
    plain.send(
        with_signals(1, name(0), origin="written", reward=1.0),
        with_signals(2, name(0), edits=(edit("nobody", turn(2)),)),
    )
    refused = [(outcome.dropped, outcome.detail) for outcome in plain.state.outcomes]
    return int(outcomes != expected) + int(refused != [("invalid", "written"), ("no_reward", None)])


def every(seeds: Sequence[int], base: Path) -> Iterator[tuple[str, int]]:
    """Each promise by name, with how often it was broken."""
    yield "P2: tokens that are not those of the branch", sum(tokens_made_anew(base, seed) for seed in seeds)
    yield "P4: examples that were trained twice", sum(trained_twice(base, seed) for seed in seeds)
    yield "P5, P6: outcomes that do not say what happened", outcomes_that_are_wrong(base, 0)
    for label, signals, kind in (
        ("sft", SFT, "demonstrations"), ("dpo", DPO, "preferences"), ("kto", KTO, "labels"),
    ):  # fmt: skip
        lost = sum(wrong_in_the_end(base, signals, kind, seed) for seed in seeds)
        yield f"P10: {label}: examples of which the weights do not hold the last word", lost
        yield f"P9: {label}: batches with other bytes", sum(other_bytes(base, signals, kind, seed) for seed in seeds)
    yield "dpo: answers on the wrong side, or beside another one's", sum(wrong_sides(base, seed) for seed in seeds)
    yield "dpo: answers of two tenants that met", tenants_that_met(base, 0)
