"""The promises about the stream, with edits and preferences in it. Each function counts what does not hold."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

from headrace_schemas import Experience
from headrace_trainer.algorithms.baselines import Decay
from headrace_trainer.algorithms.settings import AdvantageSettings, LossSettings
from headrace_trainer.algorithms.signals import Signals
from headrace_trainer.batches.prepare import PreparedBatch, prepare
from headrace_trainer.experiences.admission import AdmissionLimits
from headrace_trainer.experiences.edits import EditWriter
from headrace_trainer.experiences.history import History
from headrace_trainer.experiences.pairing import form_parties
from headrace_trainer.experiences.pending_updates import CorrectionRules
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.settings import MemorySettings
from tests.algorithms.told import WORDS, edit, side, told, turn
from tests.unit.trainer.test_history import chain, name
from tests.unit.trainer.world import START

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
        self.place = 0
        self.batches: list[PreparedBatch] = []

    def send(self, *events: Experience) -> None:
        for event in events:
            self.state.admit(event, (0, self.place), START)
            self.place += 1

    def train(self, waited_s: float = 0.0) -> PreparedBatch | None:
        """All that can be."""
        self.state.sweep()
        items = self.state.waiting
        if self.signals.paired:
            now = START + timedelta(seconds=waited_s)
            found = form_parties(
                items, timedelta(seconds=300), now, self.state.open_answers, self.state.has_corrections
            )
            for item in found.unpaired:
                self.state.drop(item, "singleton", "unpaired")
            items = found.ready
        if not items:
            return None
        loss = LossSettings(agg_mode="seq-mean-token-sum")
        prepared = prepare(items, self.state, self.settings, DECAY, loss=loss)
        self.batches.append(prepared)
        # Slopes as a loss would have them, so that what is taken back has to come with its own.
        trained = [replace(one, factor=self.draw.uniform(0.1, 1)) for one in prepared.trained]
        self.state.record_step(trained, prepared.baselines, 0.01)
        return prepared

    def held(self) -> dict[tuple[str, str], float]:
        """What the weights hold: of each example the sum of its contributions, weighted as they were."""
        found: dict[tuple[str, str], float] = {}
        for experience_id in self.state.window:
            entry = self.state.window.get(experience_id)
            for one in entry.contributions if entry else ():
                key = (experience_id, one.part)
                found[key] = found.get(key, 0.0) + one.advantage * one.token_weight
        return {key: value for key, value in found.items() if abs(value) > 1e-9}


def revisions(draw: random.Random, number: int) -> list[Experience]:
    """One experience as it is revised: edits and sides come, change and are withdrawn. Its partner is the next one."""
    pair, which = f"p{number // 2}", ("chosen", "rejected")[number % 2]
    found = []
    for revision in range(draw.randint(1, 4)):
        edits = tuple(edit(draw.choice(WORDS), turn(number)) for _ in range(draw.choice((0, 0, 1, 1, 2))))
        sides = (side(pair, which, turn(number)),) if draw.random() < 0.7 else ()  # type: ignore[arg-type]
        found.append(told(number, name(0), edits=edits, preferences=sides, revision=revision))
    return found


def wrong_in_the_end(base: Path, signals: Signals, kind: str, seed: int) -> int:
    """Revisions in any order, some twice, with steps in between: examples of which the weights do not hold the last
    word. Sides of a preference are trained with their partners, so they are compared where both have a last word that
    says so."""
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
    held = stream.held()
    wrong = 0
    for several in histories:
        last = max(several, key=lambda one: one.revision)
        wanted = {one.part: one.value for one in stream.state.limits.examples(last)}
        for part in {*wanted, *(part for experience, part in held if experience == last.experience_id)}:
            value = held.get((last.experience_id, part), 0.0)
            target = wanted.get(part) or 0.0
            alone = signals.paired and part.startswith("preference/") and value == 0.0
            wrong += not (alone or (target > 0) - (target < 0) == (value > 0) - (value < 0))
    return wrong


def trained_twice(base: Path, seed: int) -> int:
    """P4: the same records again, after they were trained."""
    stream = Stream(base, SFT, "demonstrations", seed)
    events = [told(number, name(0), edits=(edit(WORDS[number], turn(number)),)) for number in range(5)]
    stream.send(*events, *events)
    first = stream.train()
    stream.send(*events)
    again = stream.train()
    return abs(len(first.batch.rows) - 5 if first else 5) + (len(again.batch.rows) if again else 0)


def other_bytes(base: Path, signals: Signals, kind: str, seed: int) -> int:
    """P9: the same records once more, whatever is beside them in the process."""

    def digests() -> list[str]:
        draw = random.Random(seed)
        stream = Stream(base, signals, kind, seed)
        for number in range(8):
            for event in revisions(draw, number):
                stream.send(event)
            stream.train()
        stream.train(waited_s=301)
        return [one.batch.digest() for one in stream.batches]

    first = digests()
    return int(first != digests()) + int(not first)


def tokens_made_anew(base: Path, seed: int) -> int:
    """P2: rows whose prompt or answer is not token by token that of the branch, or whose loss is elsewhere."""
    stream, wrong = Stream(base, DPO, "preferences", seed), 0
    spans = [name(0), name(0), name(0)]
    first = told(1, name(0), versions=spans, length=17, preferences=(side("p", "chosen", turn(1, 1)),))
    other = told(2, name(0), versions=spans, length=17, preferences=(side("p", "rejected", turn(2, 2)),))
    edited = told(3, name(0), versions=spans, length=17, edits=(edit("nobody", turn(3, 1)),))
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
        whole = list(event.branch.token_ids)
        wrong += row.token_ids_T[: span.start].tolist() != whole[: span.start]
        wrong += row.loss_mask_T[: span.start].any() or not row.loss_mask_T[span.start :].all()
        wrong += row.written != written
        if not written:
            wrong += row.token_ids_T.tolist() != whole[: span.stop]
            wrong += row.behaviour_T[span.start :].tolist() != list(span.logprobs)
    return int(wrong)


def wrong_sides(base: Path, seed: int) -> int:
    """What was chosen has an advantage of 1 and what was rejected one of -1, and both are together with their own."""
    stream = Stream(base, DPO, "preferences", seed)
    for number in range(0, 6, 2):
        both = (("chosen", number), ("rejected", number + 1))
        stream.send(*(told(one, name(0), preferences=(side(f"p{number}", which, turn(one)),)) for which, one in both))  # type: ignore[arg-type]
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
        told(1, name(0), preferences=(side("p", "chosen", turn(1)),), tenant="a"),
        told(2, name(0), preferences=(side("p", "rejected", turn(2)),), tenant="b"),
    )
    prepared = stream.train(waited_s=301)
    said = [outcome.detail for outcome in stream.state.outcomes]
    return (len(prepared.batch.rows) if prepared else 0) + (said != ["unpaired", "unpaired"])


def outcomes_that_are_wrong(base: Path, seed: int) -> int:
    """P5 and P6: what is too old, what carries no signal, and what waits in vain ends as that, and nothing as a
    zero."""
    old = Stream(base, SFT, "demonstrations", seed, chain(5))
    old.send(
        told(1, name(1), edits=(edit("nobody", turn(1)),)),
        told(2, name(1), origin="written"),
        told(3, name(5), reward=1.0),
        told(4, name(5), edits=(edit("<|im_end|>", turn(4)),)),
        told(5, name(5), edits=(edit("nobody", turn(5)),)),
        told(6, "m@ffffffffffff", edits=(edit("nobody", turn(6)),)),
    )
    old.train()
    said = {one.experience_id: (one.dropped, one.detail) for one in old.state.outcomes}
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
    plain.send(told(1, name(0), origin="written", reward=1.0), told(2, name(0), edits=(edit("nobody", turn(2)),)))
    refused = [(one.dropped, one.detail) for one in plain.state.outcomes]
    return int(said != expected) + int(refused != [("invalid", "written"), ("no_reward", None)])


def every(seeds: Sequence[int], base: Path) -> Iterator[tuple[str, int]]:
    """Each promise by name, with how often it was broken."""
    yield "P2: tokens that are not those of the branch", sum(tokens_made_anew(base, seed) for seed in seeds)
    yield "P4: examples that were trained twice", sum(trained_twice(base, seed) for seed in seeds)
    yield "P5, P6: outcomes that do not say what happened", outcomes_that_are_wrong(base, 0)
    for what, signals, kind in (
        ("sft", SFT, "demonstrations"), ("dpo", DPO, "preferences"), ("kto", KTO, "labels"),
    ):  # fmt: skip
        lost = sum(wrong_in_the_end(base, signals, kind, seed) for seed in seeds)
        yield f"P10: {what}: examples of which the weights do not hold the last word", lost
        yield f"P9: {what}: batches with other bytes", sum(other_bytes(base, signals, kind, seed) for seed in seeds)
    yield "dpo: answers on the wrong side, or beside another one's", sum(wrong_sides(base, seed) for seed in seeds)
    yield "dpo: answers of two tenants that met", tenants_that_met(base, 0)
