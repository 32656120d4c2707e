"""Trainer in memory for tests: a bus, a manual clock, a runner until no work is left, and experiences with all signals.

Helpers return the learner, policy and optimizer of a lineage whose weights are in this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from headrace_runtime.errors import InvalidEvent
from headrace_runtime.kafka.wire import Record
from headrace_runtime.settings.sections import RefusalBounds
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.stream.pausing import DeadLetterLimiter
from headrace_schemas import Branch, Checkpoint, Event, Experience, ModelEvent, Span, TrainingMetrics, TrainingOutcome
from headrace_schemas.events.chat import Message
from headrace_schemas.events.checkpoint import Decision
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.events.trajectory import Edit, NoReward, PreferenceSide, TurnReward
from headrace_schemas.values.ids import session_key
from headrace_trainer.experiences.reports import Offsets
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.lineage.lineage import Lineage
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.replay import DryRun
from headrace_trainer.report import Reporter
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.torch_learner.learner import TorchLearner
from headrace_trainer.torch_learner.model.policy import Policy
from headrace_trainer.torch_learner.optimizer import Optimizer
from headrace_trainer.trainer import Trainer
from tests.support.training_history import follow

START = datetime(2026, 11, 20, 12, tzinfo=UTC)
VOCABULARY = 320


class Idle(Exception):
    """Raised when the trainer has read all records and waits."""


class HandClock:
    """Clock that stands still unless a task sleeps or a test advances it."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def now(self) -> datetime:
        return START + timedelta(seconds=self.offset_s)

    def monotonic_s(self) -> float:
        self.offset_s += 1e-6
        return self.offset_s

    async def sleep(self, seconds: float) -> None:
        self.offset_s += seconds
        await asyncio.sleep(0)


@dataclass
class Bus:
    """Produced records in order, and the trainer's published events and refused records."""

    partitions: int = 2
    records: list[Record] = field(default_factory=list)
    sent: list[Event] = field(default_factory=list)
    refused: list[tuple[Record, InvalidEvent]] = field(default_factory=list)

    def produce(self, *events: Event) -> None:
        for event in events:
            partition = sum(event.key.encode()) % self.partitions if isinstance(event, Experience) else 0
            headers = Envelope.of(event, "test").headers()
            self.add(event.topic, event.to_json(), partition, headers)

    def add(
        self, topic: str, value: bytes | None, partition: int = 0, headers: Sequence[tuple[str, bytes | None]] = ()
    ) -> None:
        offset = sum(record.topic == topic and record.partition == partition for record in self.records)
        self.records.append(Record(topic, partition, offset, b"k", value, tuple(headers)))

    async def send(self, event: Event) -> None:
        self.sent.append(event)

    async def refuse(self, record: Record, error: InvalidEvent) -> None:
        self.refused.append((record, error))

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """Return the published checkpoints without duplicates, in order."""
        return list({event.event_id: event for event in self.sent if isinstance(event, Checkpoint)}.values())

    @property
    def accounts(self) -> list[TrainingMetrics]:
        """Return the published accounts without duplicates, in order."""
        return list({event.event_id: event for event in self.sent if isinstance(event, TrainingMetrics)}.values())

    @property
    def verdicts(self) -> list[TrainingOutcome]:
        return [verdict for account in self.accounts for verdict in account.verdicts]

    @property
    def fates(self) -> dict[tuple[str, int], str]:
        """Return the outcome of each (experience, revision), see `tests.support.training_history`. Fail on a
        contradiction."""
        fates, wrong = follow(self.accounts)
        assert not wrong
        return fates


class MemorySource:
    """Implementation of `headrace_trainer.source.Source` that reads a `Bus`."""

    def __init__(self, bus: Bus, clock: HandClock, per_poll: int = 3, wait_s: float = 0.0) -> None:
        """Create a source in which each empty poll takes `wait_s` seconds. Three empty polls in a row end the
        trainer."""
        self._bus = bus
        self._clock = clock
        self._per_poll = per_poll
        self._wait_s = wait_s
        self._next: dict[tuple[str, int], int] = {}
        self._empty = 0
        self.rooms: list[int] = []
        self.busy: Callable[[], bool] = bool
        """Whether the trainer still does something, so that it is not ended."""

    async def start(self, offsets: Offsets) -> None:
        self._next = {(topic, p): offset for topic, parts in offsets.items() for p, offset in parts.items()}

    async def poll(self, room: int) -> list[Record]:
        await asyncio.sleep(0)
        self.rooms.append(room)
        records: list[Record] = []
        for record in self._bus.records:
            position = (record.topic, record.partition)
            if record.offset < self._next.get(position, 0) or len(records) == self._per_poll:
                continue
            if record.topic != ModelEvent.topic:
                if room == 0:
                    continue
                room -= 1
            self._next[position] = record.offset + 1
            records.append(record)
        self._empty = 0 if records else self._empty + 1
        self._clock.offset_s += 0.0 if records else self._wait_s
        if self._empty > 2:
            if not self.busy():
                raise Idle
            await asyncio.sleep(0.001)
        return records

    async def at_end(self) -> bool:
        """Return True, because a bus in memory does not grow while it is read."""
        return all(r.offset < self._next.get((r.topic, r.partition), 0) for r in self._bus.records)

    async def fetch(self, positions: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Record]:
        by_position = {(r.partition, r.offset): r for r in self._bus.records if r.topic == Experience.topic}
        return {position: by_position[position] for position in positions if position in by_position}

    async def stop(self) -> None: ...


class Quiet(Reporter):
    """Reporter that records its calls and writes no files."""

    def __init__(self) -> None:
        self.steps: list[Mapping[str, float]] = []
        self.stops: list[str | None] = []

    def report_step(self, measured: Mapping[str, float], state: LineageState) -> None:
        self.steps.append(measured)

    def report_version(self, version: str, number: int, step: int) -> None: ...

    def report_stop(self, reason: str | None, state: LineageState) -> None:
        self.stops.append(reason)

    def report_decision(self, event: ModelEvent, number: int, step: int) -> None: ...

    def close(self) -> None: ...


@dataclass
class World:
    """Bus, blob store and clock, which survive the restart of a trainer."""

    folder: Path
    bus: Bus = field(default_factory=Bus)
    clock: HandClock = field(default_factory=HandClock)
    blobs: BlobStore = field(init=False)
    reporter: Quiet = field(default_factory=Quiet)
    source: MemorySource = field(init=False)
    bounds: RefusalBounds = field(default_factory=RefusalBounds)

    def __post_init__(self) -> None:
        self.blobs = BlobStore((self.folder / "blobs").as_uri())

    def trainer(self, settings: TrainerSettings, per_poll: int = 3, wait_s: float = 0.0) -> Trainer:
        self.source = MemorySource(self.bus, self.clock, per_poll, wait_s)
        trainer = Trainer(
            settings,
            self.blobs,
            self.source,
            self.bus,
            DeadLetterLimiter("trainer", self.bus.refuse, self.bounds),
            self.clock,
            lambda: self.reporter,
        )
        self.source.busy = lambda: trainer.is_saving
        return trainer

    async def run(self, settings: TrainerSettings, per_poll: int = 3, wait_s: float = 0.0) -> Trainer:
        """Run a trainer from its start until no work is left."""
        trainer = self.trainer(settings, per_poll, wait_s)
        with contextlib.suppress(Idle):
            await asyncio.wait_for(trainer.run(), 60)
        return trainer

    async def digests_live_and_dry(
        self, settings: TrainerSettings, events_of: Callable[[str], Sequence[Experience]]
    ) -> tuple[list[str], list[str]]:
        """Return the batch digests of a trainer and those of a dry run on the same events.

        Args:
            settings: The settings of both.
            events_of: Returns the events for the version that the lineage begins with.
        """
        self.bus.partitions = 1
        lineage = open_lineage(settings, self.blobs, self.clock)
        events = events_of(lineage.state.history.head)
        lineage.close()
        self.bus.produce(*events)
        await self.run(settings)
        dry = DryRun(settings, self.blobs)
        dry._state.history = lineage.state.history
        for event in events:
            dry.add(event)
        live = [batch.digest for account in self.bus.accounts for batch in account.batches]
        return live, [batch.digest for batch in dry.end().batches]


def experience(
    number: int,
    version: str,
    reward: float | None = 1.0,
    *,
    revision: int = 0,
    task: str | None = None,
    run: str | None = None,
    weight: float = 1.0,
    model: str = "m",
    length: int = 14,
    prompt: int = 5,
    versions: Iterable[str] = (),
    temperature: float = 1.0,
    no_reward: NoReward = "withdrawn",
    branch: bool = True,
) -> Experience:
    """Return an experience. Equal arguments always give equal events. `versions` make one span each after the
    prompt."""
    draw = random.Random(number)
    names = list(versions) or [version]
    width = (length - prompt) // len(names)
    spans = tuple(
        Span(
            start=prompt + index * width,
            logprobs=tuple(-draw.uniform(4, 7) for _ in range(width)),
            turn_id=f"turn-{number}-{index}",
            version=name,
            temperature=temperature,
        )
        for index, name in enumerate(names)
    )
    tokens = tuple(draw.randrange(VOCABULARY) for _ in range(length))
    return Experience(
        time=START,
        experience_id=f"e{number}",
        revision=revision,
        trajectory_id=f"t{number}",
        session_key=session_key("default", f"s{number}"),
        session_id=f"s{number}",
        task_id=task,
        run_id=run,
        model=model,
        branch=Branch(token_ids=tokens, spans=spans) if branch else None,
        turn_ids=tuple(span.turn_id for span in spans),
        weight=weight,
        reward=reward,
        no_reward=no_reward if reward is None else None,
    )


def decision(version: str, kind: Decision, previous: str | None = None, number: int = 0) -> ModelEvent:
    return ModelEvent(
        time=START,
        decision_id=f"{kind}-{version}-{number}",
        model="m",
        version=version,
        decision=kind,
        previous=previous,
    )


WORDS = ("the agent", "a question", "search", "Monday", "an invoice", "nobody")


def edit(text: str, turn: str, source: str = "feedback") -> Edit:
    return Edit(turn_id=turn, source=source, message=Message(role="assistant", content=text))


def side(name: str, which: Literal["chosen", "rejected"], turn: str) -> PreferenceSide:
    return PreferenceSide(preference_id=name, side=which, turn_id=turn)


def with_signals(
    number: int,
    version: str,
    *,
    edits: tuple[Edit, ...] = (),
    preferences: tuple[PreferenceSide, ...] = (),
    turn_rewards: tuple[TurnReward, ...] = (),
    origin: Literal["sampled", "written"] = "sampled",
    tenant: str = "default",
    reward: float | None = None,
    **fields: Any,
) -> Experience:
    """Return `experience` with the given signals. It has a reward only if one is given."""
    signals = {"edits": edits, "preferences": preferences, "turn_rewards": turn_rewards}
    plain = experience(number, version, reward, **{"no_reward": "no_reward", **fields})
    branch = plain.branch
    if origin == "written" and branch is not None:
        spans = tuple(span.model_copy(update={"logprobs": (0.0,) * len(span.logprobs)}) for span in branch.spans)
        branch = Branch(token_ids=branch.token_ids, spans=spans)
    update = {**signals, "origin": origin, "tenant": tenant, "branch": branch}
    return Experience.model_validate({**plain.model_copy(update=update).model_dump(mode="json")})


def turn(number: int, index: int = 0) -> str:
    """Return the id that `experience` gives to a turn."""
    return f"turn-{number}-{index}"


def torch_learner(lineage: Lineage | None) -> TorchLearner:
    """Return the learner of an open lineage with the back end `torch`."""
    assert lineage is not None
    assert isinstance(lineage.learner, TorchLearner)
    return lineage.learner


def policy_of(lineage: Lineage | None) -> Policy:
    """Return the policy that the lineage trains."""
    return torch_learner(lineage).policy


def optimizer_of(lineage: Lineage | None) -> Optimizer:
    """Return the optimizer of the lineage."""
    return torch_learner(lineage).optimizer
