"""Three independent ledgers, and a comparison of the facts on which they must agree.

The client's ledger has the answers that users received, `Facts` the captured turns and their outcomes on the topics,
and the trainer's ledger the experiences in its saved weights. The topics are read without a consumer group;
contradictions between their events are recorded.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from aiokafka import AIOKafkaConsumer, TopicPartition

from headrace_operations import turn_account
from headrace_operations.supervisor.overrides import Overrides
from headrace_operations.turn_account import TurnAccount
from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.wire import decode
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import DeadLetter, Event, Experience, Feedback, TrainingMetrics, Trajectory, Turn
from headrace_schemas.rules.turn_history import TurnHistory
from tests.chaos.client import Acked, ClientLedger, digest, tokens_digest

TOPICS = (*turn_account.TOPICS, Feedback.topic)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
Revision = tuple[str, int]
"""An experience id and a revision number."""


@dataclass(slots=True)
class Facts:
    """Ledger of the topics. Pass every event of `TOPICS` to `add`, repeated events as well."""

    turns: dict[str, Acked] = field(default_factory=dict)
    """Captured turns by id: digests of the text and of the tokens, and the version."""
    sampled: dict[tuple[str, int], str] = field(default_factory=dict)
    """Digest of the version, the sampled token ids and their logprobs, by turn and choice."""
    spans: dict[tuple[str, int], set[str]] = field(default_factory=lambda: defaultdict(set))
    """Digests of the same turns and choices in experiences. More than one or a different digest is a contradiction."""
    trajectory_of: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Trajectories by turn; more than one is a contradiction."""
    trajectories: dict[str, bool] = field(default_factory=dict)
    """Trajectories by id: whether they contain a part that can be trained."""
    experiences: dict[Revision, str] = field(default_factory=dict)
    """Trajectory of each revision of an experience."""
    newest: dict[str, tuple[int, str, bool, float | None]] = field(default_factory=dict)
    """Newest revision by experience: its number, its session, whether it has a reward, and the part of the reward that
    is feedback.
    """
    verdicts: dict[str, dict[Revision, list[str | None]]] = field(default_factory=lambda: defaultdict(dict))
    """Outcomes of each revision by lineage, one entry per report: None for trained, otherwise the reason of the drop.
    """
    again: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    """Number of times that a revision was queued again after a rollback of the weights, by lineage, experience and
    revision.
    """
    feedback: set[str] = field(default_factory=set)
    letters: list[str] = field(default_factory=list)
    records: Counter[str] = field(default_factory=Counter)
    redelivered: Counter[str] = field(default_factory=Counter)
    """Number of records that repeat an event. They are allowed, since consumers remove duplicates by id."""
    changed: list[str] = field(default_factory=list)
    """Events that were repeated with different contents, which is not allowed."""
    account: turn_account.TurnAccountBuilder = field(default_factory=turn_account.TurnAccountBuilder)
    """Account as `headrace status` computes it, built for a comparison."""
    _history: TurnHistory = field(default_factory=TurnHistory)
    _bodies: dict[str, str] = field(default_factory=dict)
    """Digest of the event by topic and event id."""

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
        event = self._history.whole_turn(event)
        first = event.choices[0]
        tokens = tokens_digest(event.prompt_token_ids, first.token_ids)
        self.turns[event.turn_id] = Acked(event.session_id, digest(first.message.text), tokens, event.version)
        for choice in event.choices:
            self.sampled[event.turn_id, choice.index] = _sampled(event.version, choice.token_ids, choice.logprobs)

    def _report(self, event: TrainingMetrics) -> None:
        outcomes = self.verdicts[event.lineage]
        for verdict in event.verdicts:
            outcomes.setdefault((verdict.experience_id, verdict.revision), []).append(verdict.dropped)
        for undone in event.undone:
            self.again[event.lineage, undone.experience_id, undone.revision] += undone.queued

    def _experience(self, event: Experience) -> None:
        self.experiences[event.experience_id, event.revision] = event.trajectory_id
        value = next((part.value for part in event.parts if part.source == "feedback"), None)
        newest = (event.revision, event.session_id, event.reward is not None, value)
        newest_revision = self.newest.get(event.experience_id)
        self.newest[event.experience_id] = (
            newest if newest_revision is None or newest[0] >= newest_revision[0] else newest_revision
        )
        branch = event.branch
        for span in branch.spans if branch else ():
            sampled = _sampled(span.version, branch.token_ids[span.start : span.stop] if branch else (), span.logprobs)
            self.spans[span.turn_id, span.choice].add(sampled)

    def _repeats(self, event: Event) -> bool:
        if isinstance(event, Feedback):  # dated anew by each gateway that its client repeats it to
            event = event.model_copy(update={"time": EPOCH})
        body = hashlib.sha256(event.to_json()).hexdigest()
        key = f"{event.topic} {event.event_id}"
        first_body = self._bodies.get(key)
        self._bodies[key] = first_body or body
        if first_body is None:
            return False
        self.redelivered[event.topic] += 1
        if first_body != body:
            self.changed.append(key)
        return True

    def trained_twice(self) -> list[str]:
        """Return the revisions that a lineage reports as trained twice without being queued again between."""
        return [
            f"experience {name} revision {revision} in lineage {lineage}, {outcomes.count(None)} times"
            for lineage, outcomes_by_revision in self.verdicts.items()
            for (name, revision), outcomes in outcomes_by_revision.items()
            if outcomes.count(None) > 1 + self.again[lineage, name, revision]
        ]

    def trainings(self, lineage: str, name: str, revisions: Iterable[int]) -> int:
        """Return how often `revisions` of the experience `name` may have changed the weights."""
        return sum(1 + self.again[lineage, name, revision] for revision in revisions)

    def waiting(self, lineage: str) -> dict[str, set[str]]:
        """Return the open work by kind, for example turns without a trajectory. All sets are empty once the stack has
        caught up.
        """
        rewarded = set(self.experiences.values())
        outcomes = self.verdicts.get(lineage, {})
        return {
            "turns for the end of their session": {turn for turn in self.turns if not self.trajectory_of.get(turn)},
            "trajectories for a reward": {
                name for name, trainable in self.trajectories.items() if trainable and name not in rewarded
            },
            "experiences for training": {
                f"{name} revision {revision}" for name, revision in self.experiences.keys() - outcomes.keys()
            },
        }


def _sampled(version: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> str:
    return digest(f"{version} {list(token_ids)} {[float(logprob).hex() for logprob in logprobs]}")


class Reader:
    """Reader of the topics that continues at the end of its previous reading."""

    def __init__(self, bus: str, blobs: BlobStore) -> None:
        self._settings = Overrides(None, {}, {}).bus_settings(bus)
        self._blobs = blobs
        self._positions: dict[TopicPartition, int] = {}

    async def read(self, facts: Facts) -> int:
        """Add the records since the previous reading to `facts` and return their number."""
        reader = consumer(self._settings, "chaos")
        await reader.start()
        try:
            return sum([await self._read(reader, topic, facts) for topic in TOPICS])
        finally:
            await reader.stop()

    async def _read(self, reader: AIOKafkaConsumer, topic: str, facts: Facts) -> int:
        partitions = await assign_all(reader, topic)
        ends = await reader.end_offsets(partitions)
        for partition in partitions:
            reader.seek(partition, self._positions.get(partition, 0))
        count = 0
        while any([await reader.position(partition) < ends[partition] for partition in partitions]):
            for messages in (await reader.getmany(timeout_ms=200)).values():
                for message in messages:
                    facts.add((await decode(record_of(message), self._blobs)).event)
                    count += 1
        for partition in partitions:
            self._positions[partition] = await reader.position(partition)
        return count


SHOWN = 5
"""Number of examples of each broken promise in the report."""


@dataclass(frozen=True, slots=True)
class TrainerLedger:
    """Ledger of the trainer: the saved state of the lineage, read from the blob store after all processes stopped."""

    lineage: str
    contributions: Mapping[str, tuple[int, ...]]
    """Steps in which each experience changed the weights."""
    revisions: Mapping[str, tuple[int, ...]]
    waiting: frozenset[str]
    """Experiences that were read and have not been trained yet."""
    steps: int


@dataclass(slots=True)
class Findings:
    """Result of the comparison. `broken` has the offenders of each broken promise."""

    broken: dict[str, list[str]] = field(default_factory=dict)
    table: dict[str, int] = field(default_factory=dict)

    def check(self, promise: str, offenders: Iterable[str]) -> None:
        """Record the offenders against a promise. Without offenders the promise holds."""
        sorted_offenders = sorted(offenders)
        self.table[promise] = len(sorted_offenders)
        if sorted_offenders:
            self.broken[promise] = sorted_offenders


LOST = "acked turns lost"
DOUBLE = "experiences trained twice within a lineage"
FAILED = "failed user requests"
VALUES = "feedback that counts with another value than its user's last word"


def compare(client: ClientLedger, topics: Facts, account: TurnAccount, trainer: TrainerLedger) -> Findings:
    """Compare all facts on which the ledgers must agree."""
    findings = Findings()
    _client_and_topics(findings, client, topics)
    _within_topics(findings, topics, account, trainer.lineage)
    _topics_and_trainer(findings, topics, trainer)
    return findings


def _client_and_topics(findings: Findings, client: ClientLedger, topics: Facts) -> None:
    findings.check(FAILED, client.failures)
    findings.check(LOST, client.acked.keys() - topics.turns.keys())
    both = client.acked.keys() & topics.turns.keys()
    for label, attribute in (("text", "content"), ("token ids", "tokens"), ("version", "version")):
        seen = {name: (getattr(client.acked[name], attribute), getattr(topics.turns[name], attribute)) for name in both}
        findings.check(
            f"turns whose {label} the user did not see",
            (
                f"{name}: {captured}, the user saw {received}"
                for name, (received, captured) in seen.items()
                if received != captured
            ),
        )
    findings.check("acked feedback lost", client.feedback_ids - topics.feedback)
    rewarded = {session for _, session, has_reward, _ in topics.newest.values() if has_reward}
    findings.check("judged sessions without a reward", client.judged.keys() - rewarded)
    findings.check(VALUES, _other_values(client, topics))


def _other_values(client: ClientLedger, topics: Facts) -> Iterable[str]:
    """Yield sessions whose reward is not the last feedback.

    With two gateways, feedback that one gateway acknowledged may wait in its spool while the bus receives later
    feedback of the other, so the order in the log decides. The reward must still be one of the session's feedback
    values.
    """
    experiences = Counter(session for _, session, *_ in topics.newest.values())
    for _, session, has_reward, value in topics.newest.values():
        verdicts = client.judged.get(session)
        if not verdicts or not has_reward:
            continue
        allowed = {verdicts[-1].value} if len(client.reached[session]) == 1 else {verdict.value for verdict in verdicts}
        if value not in allowed:
            words = ", ".join(f"{verdict.value} at {verdict.gateway}" for verdict in verdicts)
            reached = ", ".join(sorted(client.reached[session]))
            yield f"session {session} of {experiences[session]} experiences: {value}, the user said {words}; {reached}"


def _within_topics(findings: Findings, topics: Facts, account: TurnAccount, lineage: str) -> None:
    findings.check(
        "turns in two trajectories",
        (turn for turn, trajectories in topics.trajectory_of.items() if len(trajectories) > 1),
    )
    findings.check("events repeated with other contents", topics.changed)
    findings.check(
        "trained tokens, logprobs or versions that are not the captured ones",
        (
            f"{turn} choice {choice}"
            for (turn, choice), digests in topics.spans.items()
            if digests != {topics.sampled.get((turn, choice))}
        ),
    )
    findings.check("dead letters", topics.letters)
    for label, names in topics.waiting(lineage).items():
        findings.check(f"left waiting: {label}", names)
    outcomes = topics.verdicts.get(lineage, {})
    findings.check(
        "verdicts on nothing", (name for name, revision in outcomes if (name, revision) not in topics.experiences)
    )
    findings.check("contradictions in the account of turns", account.problems)
    total = account.trained + sum(account.waiting.values()) + sum(account.dropped.values())
    gap = [f"{account.captured} captured, {total} accounted for"] if account.captured != total else []
    gap += (
        [f"{len(topics.turns)} turns, {account.captured} in the account"]
        if len(topics.turns) != account.captured
        else []
    )
    findings.check("turns missing from the account", gap)


def _topics_and_trainer(findings: Findings, topics: Facts, trainer: TrainerLedger) -> None:
    outcomes_by_revision = topics.verdicts.get(trainer.lineage, {})
    trained: Counter[str] = Counter()
    for (name, _), outcomes in outcomes_by_revision.items():
        trained[name] += outcomes.count(None)
    findings.check(DOUBLE, [*topics.trained_twice(), *_doubled(topics, trainer)])
    findings.check(
        "experiences in the weights that no report names",
        (name for name, steps in trainer.contributions.items() if len(steps) > trained[name]),
    )
    findings.check(
        "experiences reported as trained that the weights lack",
        (name for name, count in trained.items() if len(trainer.contributions.get(name, ())) < count),
    )
    findings.check("experiences left in the trainer's queue", trainer.waiting)


def _doubled(topics: Facts, trainer: TrainerLedger) -> list[str]:
    """Return the experiences that changed the weights too often.

    An experience may change the weights once per revision, unless the revision is queued again, and once per step.
    """
    return [
        f"experience {name} in steps {list(steps)} with revisions {list(trainer.revisions[name])}"
        for name, steps in trainer.contributions.items()
        if len(steps) > topics.trainings(trainer.lineage, name, trainer.revisions[name]) or len(set(steps)) < len(steps)
    ]
