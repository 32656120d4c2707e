"""What the topics hold, read without a consumer group: facts by id, and every contradiction between them."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from aiokafka import AIOKafkaConsumer, TopicPartition

from headrace_cli import turn_account
from headrace_cli.supervisor.overrides import Overrides
from headrace_runtime.blobs import BlobStore
from headrace_runtime.consumer import assign_all, consumer, record_of
from headrace_runtime.wire import decode
from headrace_schemas import DeadLetter, Event, Experience, Feedback, TrainingMetrics, Trajectory, Turn
from tests.chaos.client import Acked, digest, tokens_digest

TOPICS = (*turn_account.TOPICS, Feedback.topic)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Revision = tuple[str, int]
"""An experience and one revision of it."""


@dataclass(slots=True)
class Facts:
    """`add` every event of `TOPICS`, as often as it is on the bus."""

    turns: dict[str, Acked] = field(default_factory=dict)
    """Captured turns: digests of what each said and of its tokens, and its version."""
    sampled: dict[tuple[str, int], str] = field(default_factory=dict)
    """By turn and choice: digest of the version, the sampled token ids and their logprobs."""
    spans: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    """The same of what experiences hold; more than one digest, or another, is a contradiction."""
    trajectory_of: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """By turn; more than one is a contradiction."""
    trajectories: dict[str, bool] = field(default_factory=dict)
    """Whether there is anything to train in it."""
    experiences: dict[Revision, str] = field(default_factory=dict)
    """Revisions, and the trajectory that each is of."""
    newest: dict[str, tuple[int, str, bool, float | None]] = field(default_factory=dict)
    """By experience: its newest revision, its session, whether that has a reward, and feedback's value in it."""
    verdicts: dict[str, dict[Revision, list[str | None]]] = field(default_factory=lambda: defaultdict(dict))
    """By lineage: what became of each revision, None for trained, once per report that says so."""
    again: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    """By lineage, experience and revision: how often it was queued again, because weights went back behind it."""
    feedback: set[str] = field(default_factory=set)
    letters: list[str] = field(default_factory=list)
    records: Counter[str] = field(default_factory=Counter)
    redelivered: Counter[str] = field(default_factory=Counter)
    """Records that repeat an event: allowed, since consumers dedupe by id."""
    changed: list[str] = field(default_factory=list)
    """Events that were repeated with other contents: not allowed."""
    account: turn_account.TurnAccountBuilder = field(default_factory=turn_account.TurnAccountBuilder)
    """The account that `headrace status` gives, kept beside ours and compared with it."""
    _bodies: dict[str, str] = field(default_factory=dict)
    """Digest by topic and event id."""

    def add(self, event: Event) -> None:
        self.records[event.topic] += 1
        self.account.add(event)
        if self._repeats(event):
            return
        match event:
            case Turn():
                self._turn(event)
            case Trajectory():
                self.trajectories[event.trajectory_id] = bool(event.branches)
                for turn_id in event.turn_ids:
                    self.trajectory_of[turn_id].add(event.trajectory_id)
            case Experience():
                self._experience(event)
            case TrainingMetrics():
                self._report(event)
            case Feedback():
                self.feedback.add(event.event_id)
            case DeadLetter():
                self.letters.append(f"{event.service} refused {event.source_topic}: {event.reason}, {event.error}")

    def _turn(self, event: Turn) -> None:
        first = event.choices[0]
        tokens = tokens_digest(event.prompt_token_ids, first.token_ids)
        self.turns[event.turn_id] = Acked(event.session_id, digest(first.message.text), tokens, event.version)
        for choice in event.choices:
            self.sampled[event.turn_id, choice.index] = _sampled(event.version, choice.token_ids, choice.logprobs)

    def _report(self, event: TrainingMetrics) -> None:
        told = self.verdicts[event.lineage]
        for verdict in event.verdicts:
            told.setdefault((verdict.experience_id, verdict.revision), []).append(verdict.dropped)
        for undone in event.undone:
            self.again[event.lineage, undone.experience_id, undone.revision] += undone.queued

    def _experience(self, event: Experience) -> None:
        self.experiences[event.experience_id, event.revision] = event.trajectory_id
        said = next((part.value for part in event.parts if part.source == "feedback"), None)
        newest = (event.revision, event.session_id, event.reward is not None, said)
        known = self.newest.get(event.experience_id)
        self.newest[event.experience_id] = newest if known is None or newest[0] >= known[0] else known
        branch = event.branch
        for span in branch.spans if branch else ():
            held = _sampled(span.version, branch.token_ids[span.start : span.stop] if branch else (), span.logprobs)
            self.spans[span.turn_id, span.choice].add(held)

    def _repeats(self, event: Event) -> bool:
        if isinstance(event, Feedback):  # dated anew by each gateway that its client repeats it to
            event = event.model_copy(update={"time": EPOCH})
        body = hashlib.sha256(event.to_json()).hexdigest()
        key = f"{event.topic} {event.event_id}"
        known = self._bodies.get(key)
        self._bodies[key] = known or body
        if known is None:
            return False
        self.redelivered[event.topic] += 1
        if known != body:
            self.changed.append(key)
        return True

    def trained_twice(self) -> list[str]:
        """Revisions that a lineage reports as trained more than once, and not as queued again between."""
        return [
            f"experience {name} revision {revision} in lineage {lineage}, {outcomes.count(None)} times"
            for lineage, told in self.verdicts.items()
            for (name, revision), outcomes in told.items()
            if outcomes.count(None) > 1 + self.again[lineage, name, revision]
        ]

    def trainings(self, lineage: str, name: str, revisions: Iterable[int]) -> int:
        """How often `revisions` of an experience may have changed the weights."""
        return sum(1 + self.again[lineage, name, revision] for revision in revisions)

    def waiting(self, lineage: str) -> dict[str, set[str]]:
        """What still has to happen: turns without a trajectory, and so on. All empty once the stack has caught up."""
        rewarded = set(self.experiences.values())
        told = self.verdicts.get(lineage, {})
        return {
            "turns for the end of their session": {turn for turn in self.turns if not self.trajectory_of.get(turn)},
            "trajectories for a reward": {
                name for name, trainable in self.trajectories.items() if trainable and name not in rewarded
            },
            "experiences for training": {
                f"{name} revision {revision}" for name, revision in self.experiences.keys() - told.keys()
            },
        }


def _sampled(version: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> str:
    return digest(f"{version} {list(token_ids)} {[float(one).hex() for one in logprobs]}")


class Reader:
    """Reads on from where the last reading ended."""

    def __init__(self, bus: str, blobs: BlobStore) -> None:
        self._settings = Overrides(None, {}, {}).bus_settings(bus)
        self._blobs = blobs
        self._positions: dict[TopicPartition, int] = {}

    async def read(self, facts: Facts) -> int:
        """Add what the topics hold and `facts` does not have yet; returns how many records that were."""
        reader = consumer(self._settings, "chaos")
        await reader.start()
        try:
            return sum([await self._read(reader, topic, facts) for topic in TOPICS])
        finally:
            await reader.stop()

    async def _read(self, reader: AIOKafkaConsumer, topic: str, facts: Facts) -> int:
        partitions = await assign_all(reader, topic)
        ends = await reader.end_offsets(partitions)
        for one in partitions:
            reader.seek(one, self._positions.get(one, 0))
        count = 0
        while any([await reader.position(one) < ends[one] for one in partitions]):
            for messages in (await reader.getmany(timeout_ms=200)).values():
                for message in messages:
                    facts.add((await decode(record_of(message), self._blobs)).event)
                    count += 1
        for one in partitions:
            self._positions[one] = await reader.position(one)
        return count
