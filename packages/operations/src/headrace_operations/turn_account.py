"""The account: what became of every captured turn, from topics alone (ARCHITECTURE.md, "The account").

Each turn is followed through the facts about it to where it is now; nothing is computed as what is left over. Facts
that contradict each other are problems: a turn that was trained and dropped, an effect without its cause.

Standings are per lineage: a replay trains the same turns again, and that is another account. Each model is accounted in
the lineage that reported last, unless one is named.
"""

from __future__ import annotations

import collections
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from headrace_operations.untaught_feedback import CapturedTurn, UntaughtFeedback
from headrace_schemas import (
    DeadLetter,
    Event,
    Experience,
    Feedback,
    Restored,
    TrainingMetrics,
    TrainingOutcome,
    Trajectory,
    Turn,
    Undone,
)

TOPICS = tuple(event.topic for event in (TrainingMetrics, DeadLetter, Experience, Trajectory, Feedback, Turn))
"""What the account reads, effects before their causes: end offsets taken in this order make a consistent cut."""

PROBLEMS_MAX = 100
"""How many problems are spelt out; all are counted."""

_ENDS_HERE = frozenset({("collector", "turns"), ("scorer", "trajectories"), ("trainer", "experiences")})
"""A dead letter of this service about this topic ends the turn. A judge that refuses a trajectory only abstains."""


@dataclass(frozen=True, slots=True)
class TurnAccount:
    """`captured` is the sum of `trained`, `waiting` and `dropped`; without `problems`, no turn is in two of them."""

    captured: int
    trained: int
    waiting: Mapping[str, int]
    """By what they wait for: the end of their `session`, a `reward`, `training`."""
    dropped: Mapping[str, int]
    """By reason."""
    problems: tuple[str, ...]
    problems_total: int
    lineages: Mapping[str, str]
    """Model to the lineage that was counted. A model that no trainer trains has none."""
    untaught: Mapping[str, int] = field(default_factory=dict)
    """Feedback that trained nothing, because its turns cannot be trained: by the reasons of those turns."""

    @property
    def consistent(self) -> bool:
        return not self.problems_total


@dataclass(slots=True)
class _Turn:
    """What the topics say about one turn."""

    model: str = ""
    session_key: str = ""
    captured: bool = False
    eval: bool = False
    trajectory: str | None = None
    left_out: str | None = None
    untrained: str | None = None
    """Why no version is trained on it, although it was no evaluation."""
    experiences: list[str] = field(default_factory=list)


_Name = tuple[str, str]
"""Tenant and id: ids of one tenant's own calls say nothing about another's."""


@dataclass(frozen=True, slots=True)
class _Trajectory:
    """What a trajectory says of its turns, until it is known whether it was taken or refused."""

    event_id: str
    tenant: str
    session_key: str
    model: str
    turn_ids: tuple[str, ...]
    left_out: Mapping[str, str]
    untrained: str | None
    eval: bool
    ingested: bool


@dataclass(slots=True)
class _Experience:
    """A branch on its way to training: its newest revision, and what each lineage made of each revision."""

    model: str
    tenant: str
    trajectory: str
    turn_ids: frozenset[str]
    revision: int
    event_ids: dict[int, str]


@dataclass(frozen=True, slots=True)
class _Report:
    """What a lineage said with one of its saves."""

    lineage: str
    account: int
    verdicts: tuple[TrainingOutcome, ...]
    undone: tuple[Undone, ...]
    restored: tuple[Restored, ...]


class TurnAccountBuilder:
    """`add` every event of `TOPICS` once or more often, in any order, then `close`."""

    def __init__(self, lineages: Mapping[str, str] | None = None) -> None:
        self._named = dict(lineages or {})
        self._complete = True
        self._turns: dict[_Name, _Turn] = defaultdict(_Turn)
        self._trajectories: dict[str, str] = {}
        self._arrived: dict[str, _Trajectory] = {}
        self._experiences: dict[str, _Experience] = {}
        self._reports: dict[str, _Report] = {}
        self._verdicts: dict[tuple[str, str], dict[int, TrainingOutcome]] = defaultdict(dict)
        self._undone: dict[tuple[str, str], dict[int, bool]] = defaultdict(dict)
        """Revision to whether it waits to be trained again."""
        self._taken_back: dict[tuple[str, str], dict[int, TrainingOutcome]] = defaultdict(dict)
        """The last verdict that was, by revision."""
        self._latest: dict[str, tuple[datetime, str]] = {}
        self._refused: set[str] = set()
        self._feedback = UntaughtFeedback()
        self._problems: list[str] = []
        self._problems_total = 0

    def add(self, event: Event) -> None:
        """Other events than those of `TOPICS` are passed over."""
        match event:
            case Turn():
                turn = self._turns[event.tenant, event.turn_id]
                turn.captured, turn.model, turn.session_key = True, event.model, event.session_key
                turn.eval = turn.eval or event.purpose == "eval"
                turn.untrained = turn.untrained or event.untrained
            case Trajectory():
                self._add_trajectory(event)
            case Experience():
                self._add_experience(event)
            case TrainingMetrics():
                self._add_report(event)
            case Feedback():
                self._feedback.add(event)
            case DeadLetter():
                if (event.service, event.source_topic) in _ENDS_HERE:
                    self._refused.add(event.source_id)

    def _add_trajectory(self, event: Trajectory) -> None:
        if event.trajectory_id in self._arrived:
            return
        left_out = {item.turn_id: item.full_reason for item in event.left_out}
        both = sorted(left_out.keys() & {turn_id for branch in event.branches for turn_id in branch.turn_ids})
        if both:
            self._problem(f"trajectory {event.trajectory_id} both trains on turn {both[0]} and leaves it out")
        self._arrived[event.trajectory_id] = _Trajectory(
            event.event_id,
            event.tenant,
            event.session_key,
            event.model,
            event.turn_ids,
            left_out,
            event.untrained,
            eval=event.purpose == "eval",
            ingested=event.end_reason == "ingest",
        )

    def _claim_turns(self) -> None:
        """Assign each turn to the trajectory that was accepted; a refused one gets only turns that no other has."""
        refused = {name for name, one in self._arrived.items() if one.event_id in self._refused}
        for name, one in sorted(self._arrived.items(), key=lambda item: item[0] in refused):
            self._trajectories[name] = one.event_id
            for turn_id in one.turn_ids:
                turn = self._turns[one.tenant, turn_id]
                if turn.trajectory is not None:
                    if name not in refused:
                        self._problem(f"turn {turn_id} is in two trajectories, {turn.trajectory} and {name}")
                    continue
                turn.trajectory = name
                turn.left_out = one.left_out.get(turn_id)
                turn.untrained = turn.untrained or one.untrained
                turn.eval = turn.eval or one.eval
                if one.ingested or (name in refused and not turn.captured):  # made elsewhere, and captured here
                    turn.captured, turn.model, turn.session_key = True, one.model, one.session_key

    def _add_experience(self, event: Experience) -> None:
        found = self._experiences.get(event.experience_id)
        if found is None:
            turn_ids = frozenset(event.turn_ids)
            found = _Experience(event.model, event.tenant, event.trajectory_id, turn_ids, event.revision, {})
            self._experiences[event.experience_id] = found
            for turn_id in found.turn_ids:
                self._turns[event.tenant, turn_id].experiences.append(event.experience_id)
        elif found.turn_ids != frozenset(event.turn_ids):
            self._problem(f"experience {event.experience_id}: its revisions are about different turns")
        found.revision = max(found.revision, event.revision)
        found.event_ids[event.revision] = event.event_id

    def _add_report(self, event: TrainingMetrics) -> None:
        report = _Report(event.lineage, event.account, event.verdicts, event.undone, event.restored)
        if event.event_id in self._reports:
            if self._reports[event.event_id] != report:
                self._problem(f"lineage {event.lineage} reported its save {event.account} twice, differently")
            return
        self._reports[event.event_id] = report
        if event.model not in self._latest or self._latest[event.model][0] <= event.time:
            self._latest[event.model] = (event.time, event.lineage)

    def _read_reports(self) -> None:
        """In the order of the saves: what was undone may be trained again later."""
        for report in sorted(self._reports.values(), key=lambda one: (one.lineage, one.account)):
            for verdict in report.verdicts:
                self._add_verdict(report.lineage, verdict)
            for undone in report.undone:
                self._take_back(report.lineage, undone)
            for restored in report.restored:
                self._restore(report.lineage, restored)

    def _take_back(self, lineage: str, undone: Undone) -> None:
        place = lineage, undone.experience_id
        verdict = self._verdicts[place].pop(undone.revision, None)
        there = verdict is not None and (verdict.dropped is None or undone.queued)
        queued_after_all = undone.queued and self._undone[place].get(undone.revision) is False  # it had been given up
        if not (there or queued_after_all):
            self._missing(
                f"lineage {lineage} took back experience {undone.experience_id} revision {undone.revision}, "
                "which it had not trained"
            )
        if verdict is not None:
            self._taken_back[place][undone.revision] = verdict
        self._undone[place][undone.revision] = undone.queued

    def _restore(self, lineage: str, restored: Restored) -> None:
        place = lineage, restored.experience_id
        verdict = self._taken_back[place].pop(restored.revision, None)
        if verdict is None:
            self._missing(
                f"lineage {lineage} holds experience {restored.experience_id} revision {restored.revision} again, "
                "which it had not taken back"
            )
            return
        self._verdicts[place][restored.revision] = verdict.model_copy(update={"dropped": None})

    def _add_verdict(self, lineage: str, verdict: TrainingOutcome) -> None:
        known = self._verdicts[lineage, verdict.experience_id]
        earlier = known.get(verdict.revision)
        if earlier is not None and earlier.dropped is None and verdict.dropped is None:
            self._problem(
                f"experience {verdict.experience_id} revision {verdict.revision} changed lineage {lineage} twice"
            )
        if earlier is None or earlier.dropped is not None:
            known[verdict.revision] = verdict

    def close(self, *, complete: bool = True) -> TurnAccount:
        """Where every captured turn is.

        `complete`: the topics still hold everything they ever held, so that a missing cause is a problem.
        """
        self._complete = complete
        lineages = {model: lineage for model, (_, lineage) in self._latest.items()} | self._named
        self._read_reports()
        self._claim_turns()
        self._check_verdicts()
        self._check_experiences()
        self._check_turns()
        standings = collections.Counter(
            self._standing(turn_id, turn, lineages) for (_, turn_id), turn in self._turns.items() if turn.captured
        )
        waiting = {name: count for (state, name), count in sorted(standings.items()) if state == "waiting"}
        dropped = {name: count for (state, name), count in sorted(standings.items()) if state == "dropped"}
        return TurnAccount(
            captured=standings.total(),
            trained=standings["trained", ""],
            waiting=waiting,
            dropped=dropped,
            problems=tuple(self._problems),
            problems_total=self._problems_total,
            lineages=lineages,
            untaught=self._feedback.count(
                {
                    name: CapturedTurn(turn.session_key, "eval" if turn.eval else turn.untrained or turn.left_out)
                    for name, turn in self._turns.items()
                    if turn.captured
                }
            ),
        )

    def _standing(self, turn_id: str, turn: _Turn, lineages: Mapping[str, str]) -> tuple[str, str]:
        """The state of a turn: the latest step on its way that any event shows."""
        fates = [self._fate(name, lineages.get(self._experiences[name].model)) for name in sorted(turn.experiences)]
        shown = []
        if turn.eval:
            shown.append(("dropped", "eval"))
        if turn.untrained is not None and not turn.eval:
            shown.append(("dropped", turn.untrained))
        elif turn.left_out is not None:
            shown.append(("dropped", turn.left_out))
        if fates:
            trained, waits = ("trained", "") in fates, ("waiting", "training") in fates
            shown.append(("trained", "") if trained else ("waiting", "training") if waits else fates[0])
        if fates and len(shown) > 1:
            self._problem(f"turn {turn_id} is dropped as {shown[0][1]} and yet {shown[-1][0]} in an experience")
        if shown:
            return shown[0]
        if turn.trajectory is not None:
            refused = self._trajectories[turn.trajectory] in self._refused
            return ("dropped", "dead_letter") if refused else ("waiting", "reward")
        return ("dropped", "dead_letter") if turn_id in self._refused else ("waiting", "session")

    def _fate(self, name: str, lineage: str | None) -> tuple[str, str]:
        """A revision that was trained and not undone decides; otherwise the newest revision does."""
        experience = self._experiences[name]
        verdicts = self._verdicts.get((lineage, name), {}) if lineage is not None else {}
        if any(verdict.dropped is None for verdict in verdicts.values()):
            return "trained", ""
        newest = verdicts.get(experience.revision)
        if newest is not None and newest.dropped is not None:
            return "dropped", newest.reason or ""
        if experience.event_ids.get(experience.revision) in self._refused:
            return "dropped", "dead_letter"
        undone = self._undone.get((lineage, name), {}) if lineage is not None else {}
        given_up = undone.get(experience.revision) is False
        return ("dropped", "undone") if given_up else ("waiting", "training")

    def _check_verdicts(self) -> None:
        for (lineage, name), verdicts in self._verdicts.items():
            experience = self._experiences.get(name)
            if experience is None:
                self._missing(f"lineage {lineage} judged experience {name}, which nobody published")
            elif any(frozenset(verdict.turn_ids) != experience.turn_ids for verdict in verdicts.values()):
                self._problem(f"lineage {lineage} judged other turns of experience {name} than it has")

    def _check_experiences(self) -> None:
        for name, experience in self._experiences.items():
            if experience.trajectory not in self._trajectories:
                self._missing(f"experience {name} is of trajectory {experience.trajectory}, which nobody published")
                continue
            tenant, trajectory = experience.tenant, experience.trajectory
            strays = [one for one in experience.turn_ids if self._turns[tenant, one].trajectory != trajectory]
            if strays:
                self._problem(f"experience {name} names turns that are not of its trajectory: {sorted(strays)[:3]}")

    def _check_turns(self) -> None:
        for (_, turn_id), turn in self._turns.items():
            if not turn.captured:
                self._missing(f"turn {turn_id} went on without having been captured")

    def _missing(self, text: str) -> None:
        """A cause that is not there is a problem unless it may have been deleted by age."""
        if self._complete:
            self._problem(text)

    def add_or_note(self, event: Event, place: str) -> None:
        """`add`, in which an event that breaks the account is one more of its problems."""
        try:
            self.add(event)
        except Exception as error:  # noqa: BLE001 (one record must not hide all others)
            self._problem(f"{place}: this {type(event).__name__} cannot be accounted for: {type(error).__name__}")

    def _problem(self, text: str) -> None:
        self._problems_total += 1
        if len(self._problems) < PROBLEMS_MAX:
            self._problems.append(text)


def turn_account_of(
    events: Iterable[Event], lineages: Mapping[str, str] | None = None, *, complete: bool = True
) -> TurnAccount:
    """Account for all `events` at once; see `TurnAccountBuilder`."""
    builder = TurnAccountBuilder(lineages)
    for event in events:
        builder.add(event)
    return builder.close(complete=complete)
