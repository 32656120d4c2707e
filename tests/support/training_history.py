"""A generated history of training, and a comparison of `models why` and `sessions where` with it.

The history has sessions, experiences with revisions, saves, refusals and reversals. The content of each version is
recorded at its publication, independently of the reports that the commands read. `follow` derives the status of each
revision of each experience from a lineage's reports alone.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from datetime import timedelta

from headrace.topics import Entry, Range
from headrace_operations.lineage.sessions import trace_session
from headrace_operations.lineage.versions import VersionTrace, trace_version
from headrace_schemas import (
    BatchRecord,
    Checkpoint,
    Event,
    Experience,
    PartitionRead,
    RestoredOutcome,
    RevertedOutcome,
    RewardPart,
    TrainingMetrics,
    TrainingOutcome,
    Trajectory,
)
from headrace_schemas.values.blobs import BlobRef
from headrace_schemas.values.ids import session_key
from tests.support.turns import START, branch_of_turns, trajectory

Name = tuple[str, int]
BLOB = BlobRef(uri="memory://m", sha256="0" * 64, size=1)
REASONS = ("stale", "overflow", "singleton", "superseded")


@dataclass
class History:
    """Generated history: the `events` in the order of publication, and the expected facts about them."""

    chance: random.Random
    lineage: str = "main"
    events: list[Event] = field(default_factory=list)
    sessions: dict[str, list[Name]] = field(default_factory=dict)
    experiences: dict[Name, Experience] = field(default_factory=dict)
    contents: dict[str, dict[Name, int]] = field(default_factory=dict)
    """Experiences of each version, each with the last save before the version that trained it."""
    parents: dict[str, str | None] = field(default_factory=dict)
    published: dict[str, int] = field(default_factory=dict)
    held: dict[Name, int] = field(default_factory=dict)
    trained: dict[Name, int] = field(default_factory=dict)
    """Last save that trained a revision, even if a rollback removed its effect."""
    dropped: dict[Name, tuple[str, int]] = field(default_factory=dict)
    given_up: dict[Name, bool] = field(default_factory=dict)
    """Undone revisions, and whether each waits for training."""
    waiting: list[Name] = field(default_factory=list)
    head: str = ""
    account: int = 0
    step: int = 0

    def begin(self) -> None:
        self._save([], [], [], publish=True)

    def session(self, number: int) -> None:
        """Add a session with its runs, and the revisions of their experiences."""
        name = f"session-{number}"
        key = session_key("default", name)
        self.sessions[name] = []
        for run in range(self.chance.randint(1, 2)):
            branches = [(f"{name}.{run}.{b}",) for b in range(self.chance.randint(0, 2))]
            purpose = self.chance.choice(["train", "train", "train", "eval"])
            event = trajectory(
                f"{name}.{run}", *branches, session_key=key, session_id=name, purpose=purpose,
                left_out={f"{name}.{run}.x": "retried"} if self.chance.random() < 0.2 else None,
                untrained="registered" if self.chance.random() < 0.1 else None,
            )  # fmt: skip
            self.events.append(event)
            if purpose == "train" and event.untrained is None:
                self._experiences(event, key)

    def _experiences(self, event: Trajectory, key: str) -> None:
        for index in range(len(event.branches)):
            for revision in range(self.chance.choice([1, 1, 2, 3])):
                reward = self.chance.choice([None, 0.0, 0.5, 1.0])
                experience = Experience(
                    time=START, experience_id=Experience.id_of(event.trajectory_id, index), revision=revision,
                    trajectory_id=event.trajectory_id, session_key=key, session_id=event.session_id, model="m",
                    branch_index=index, branch=branch_of_turns(*event.branches[index].turn_ids),
                    turn_ids=event.branches[index].turn_ids, reward=reward,
                    no_reward="no_reward" if reward is None else None,
                    parts=() if reward is None else (RewardPart(source="feedback", value=reward, weight=1.0),),
                )  # fmt: skip
                name = experience.experience_id, revision
                self.events += [experience, experience] if self.chance.random() < 0.05 else [experience]
                self.experiences[name] = experience
                self.sessions[event.session_id].append(name)
                self.waiting.append(name)

    def save(self) -> None:
        """Add a save that trains some waiting experiences and drops some.

        Sometimes change to another version before.
        """
        count = min(len(self.waiting), self.chance.randint(0, 60))
        batch_names, self.waiting = self.waiting[:count], self.waiting[count:]
        trained = [name for name in batch_names if self.chance.random() < 0.8]
        outcomes = [
            self._outcome(name, None if name in trained else self.chance.choice(REASONS)) for name in batch_names
        ]
        undone: list[RevertedOutcome] = []
        restored: list[RestoredOutcome] = []
        if self.chance.random() < 0.25:
            undone, restored = self._go_to(self.chance.choice(list(self.contents)))
        self._save(outcomes, undone, restored, publish=self.chance.random() < 0.6)

    def _outcome(self, name: Name, dropped: str | None) -> TrainingOutcome:
        self.given_up.pop(name, None)
        if dropped is None:
            self.held[name] = self.trained[name] = self.account
            self.dropped.pop(name, None)
        else:
            self.dropped[name] = dropped, self.account
        return TrainingOutcome.model_validate(
            {
                "experience_id": name[0],
                "revision": name[1],
                "turn_ids": self.experiences[name].turn_ids,
                "dropped": dropped,
            }
        )

    def _go_to(self, version: str) -> tuple[list[RevertedOutcome], list[RestoredOutcome]]:
        """Set the weights to those of `version`. Return the undone and the restored revisions."""
        contents = self.contents[version]
        lost = [name for name in self.held if name not in contents]
        back = [name for name in contents if name not in self.held]
        queued = {name: self.chance.random() < 0.5 for name in lost}
        self.held = {name: self.trained[name] for name in contents}
        for name in back:
            self.given_up.pop(name, None)
            self.dropped.pop(name, None)
        self.waiting = [name for name in self.waiting if name not in contents]
        self.given_up |= queued
        self.waiting += [name for name in lost if queued[name]]
        self.head = version
        return (
            [RevertedOutcome(experience_id=name[0], revision=name[1], queued=queued[name]) for name in lost],
            [RestoredOutcome(experience_id=name[0], revision=name[1]) for name in back],
        )

    def _save(
        self,
        outcomes: list[TrainingOutcome],
        undone: list[RevertedOutcome],
        restored: list[RestoredOutcome],
        *,
        publish: bool,
    ) -> None:
        version = None
        time = START + timedelta(seconds=self.account)
        if publish:
            version = f"m@{self.lineage_digest:08x}{self.account:08x}"
            self.contents[version] = dict(self.held)
            self.parents[version] = self.head or None
            self.published[version] = self.account
            checkpoint = Checkpoint(
                time=time, model="m", version=version, lineage=self.lineage, step=len(self.contents) - 1,
                parent=self.head or None, manifest=BLOB,
            )  # fmt: skip
            self.head = version
            self.events.append(checkpoint)
        self.step += 1
        batches = (
            BatchRecord(
                step=self.step,
                experiences=max(1, len(outcomes)),
                digest="0" * 64,
                read=(PartitionRead(partition=0, until=9),),
            ),
        )
        report = TrainingMetrics(
            time=time, model="m", lineage=self.lineage, step=self.step, account=self.account, version=version,
            verdicts=tuple(outcomes), undone=tuple(undone), restored=tuple(restored),
            batches=batches if outcomes else (), metrics={"loss": 0.5},
        )  # fmt: skip
        self.events += [report, report] if self.chance.random() < 0.1 else [report]  # announced again after a restart
        self.account += 1

    @property
    def lineage_digest(self) -> int:
        return sum(self.lineage.encode())


def final_status(history: History, name: Name) -> tuple[str, str | None] | None:
    """Return the final status of a revision, and the first version that holds it."""
    if name in history.held:
        account = history.held[name]
        holders = [
            v for v, contents in history.contents.items() if name in contents and history.published[v] >= account
        ]
        return "trained", min(holders, key=lambda v: history.published[v], default=None)
    if name in history.given_up:
        return "undone", None
    return ("dropped", None) if name in history.dropped else None


Key = tuple[str, int]
"""An experience id and a revision number."""


def follow(reports: Iterable[TrainingMetrics]) -> tuple[dict[Key, str], list[str]]:
    """Return the status of each revision and a list of contradictions. Each report counts once.

    A status is `trained`, `queued` again, `undone`, or the reason of a drop.
    """
    fates: dict[Key, str] = {}
    wrong: list[str] = []
    for report in sorted(reports, key=lambda report: report.account):
        for verdict in report.verdicts:
            key = verdict.experience_id, verdict.revision
            if fates.get(key, "queued") != "queued":
                wrong.append(f"{key} has two verdicts, and nothing was undone between them")
            fates[key] = "excluded" if verdict.detail == "excluded" else verdict.dropped or "trained"
        for undone in report.undone:
            key = undone.experience_id, undone.revision
            if fates.get(key) != "trained" and not (key in fates and undone.queued):
                wrong.append(f"{key} was undone and had done nothing")
            fates[key] = "queued" if undone.queued else "undone"
        for restored in report.restored:
            key = restored.experience_id, restored.revision
            if fates.get(key, "trained") == "trained":
                wrong.append(f"{key} was restored and had not been undone")
            fates[key] = "trained"
    return fates, wrong


TOPICS = (Checkpoint.topic, TrainingMetrics.topic, Experience.topic, Trajectory.topic)


@dataclass
class Recorded:
    """Entries that were read from the bus once, by topic and key, for a thousand queries."""

    entries: dict[str, list[Entry]]
    keyed: dict[tuple[str, str], list[Entry]]

    async def read(self, entries: Range) -> AsyncIterator[Entry]:
        with_keys = [entry for key in entries.keys for entry in self.keyed.get((entries.topic, key), [])]
        for entry in with_keys if entries.keys else self.entries[entries.topic]:
            yield entry


def recorded(entries: dict[str, list[Entry]]) -> Recorded:
    keyed: dict[tuple[str, str], list[Entry]] = defaultdict(list)
    for topic, several in entries.items():
        for entry in several:
            keyed[topic, entry.key].append(entry)
    return Recorded(entries, keyed)


def made_up(seed: int, sessions: int, saves: int) -> History:
    history = History(random.Random(seed))
    history.begin()
    for number in range(sessions):
        history.session(number)
        while history.chance.random() < saves / sessions:
            history.save()
    history.save()
    return history


def in_memory(events: list[Event]) -> Recorded:
    entries: dict[str, list[Entry]] = {topic: [] for topic in TOPICS}
    for event in events:
        several = entries[event.topic]
        several.append(Entry(event.topic, 0, len(several), START, event.key, event))
    return recorded(entries)


async def trace_in_pages(topics: Recorded, version: str, *, everything: bool) -> VersionTrace:
    """Read the trace of a version in several pages and join them."""
    first = await trace_version(topics, version, everything=everything, after=0, limit=7)
    entries = list(first.entries)
    while len(entries) < first.total:
        page = await trace_version(topics, version, everything=everything, after=len(entries), limit=1000)
        entries += page.entries
    return dataclasses.replace(first, entries=tuple(entries))


async def assert_traces_agree(topics: Recorded, history: History) -> None:
    """Assert that the traces of all versions and sessions agree with the history."""
    for version, contents in history.contents.items():
        parent = history.contents.get(history.parents[version] or "", {})
        since_parent = {name: account for name, account in contents.items() if name not in parent}
        for everything, expected in ((True, contents), (False, since_parent)):
            trace = await trace_in_pages(topics, version, everything=everything)
            assert {(entry.experience_id, entry.revision): entry.account for entry in trace.entries} == expected
            for entry in trace.entries:
                experience = history.experiences[entry.experience_id, entry.revision]
                assert (entry.session_id, entry.reward) == (experience.session_id, experience.reward)
    for session, names in history.sessions.items():
        if not names and not any(e.session_id == session for e in history.events if isinstance(e, Trajectory)):
            continue
        session_trace = await trace_session(topics, session, tenant="default", after=0, limit=1000)
        assert {(entry.experience_id, entry.revision) for entry in session_trace.entries} == set(names)
        for revision in session_trace.entries:
            statuses = [(status.outcome, status.version) for status in revision.fates]
            expected_status = final_status(history, (revision.experience_id, revision.revision))
            assert statuses == ([expected_status] if expected_status else []), (session, revision)
