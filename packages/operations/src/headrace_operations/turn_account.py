"""The turn account: the state of every captured turn, computed from topics alone (ARCHITECTURE.md, "The account").

Each turn is followed through its events to its present state; no count is computed as a remainder. Events that
contradict each other are reported as problems: a turn that was trained and dropped, an effect without its cause.

The account is per lineage, because a replay trains the same turns again in another lineage. By default the lineage that
reported last is counted for each model.
"""

from __future__ import annotations

import collections
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime

from headrace_operations.turn_states import (
    CapturedTurn,
    ExperienceState,
    SaveReport,
    TurnKey,
    TurnState,
    UnusedFeedback,
    count_tokens,
    most_frequent,
)
from headrace_schemas import (
    Checkpoint,
    DeadLetter,
    Event,
    Experience,
    Feedback,
    RestoredOutcome,
    RevertedOutcome,
    TrainingMetrics,
    TrainingOutcome,
    Trajectory,
    Turn,
)
from headrace_schemas.events.checkpoint import LearnedSignals
from headrace_schemas.rules.training import (
    TURN_ENDING_SOURCES,
    LineageOutcomes,
    RevisionOutcome,
    TrajectoryFacts,
    TurnFacts,
    TurnStatus,
    no_logprobs_reason,
    token_kind,
    turn_statuses,
)

TOPICS = tuple(
    event.topic for event in (Checkpoint, TrainingMetrics, DeadLetter, Experience, Trajectory, Feedback, Turn)
)
"""Topics that the account reads, effects before causes: end offsets read in this order are a consistent cut."""

PROBLEMS_MAX = 100
"""Number of problems that are listed; all problems are counted."""


@dataclass(frozen=True, slots=True)
class TurnAccount:
    """Numbers of captured turns by state: `captured` is the sum of `trained`, `waiting` and `dropped`.

    If `problems` is empty, every captured turn was counted in exactly one state.
    """

    captured: int
    trained: int
    waiting: Mapping[str, int]
    """Turns by the event that they wait for: the end of their `session`, a `reward`, `training`."""
    dropped: Mapping[str, int]
    """Turns by the reason why they were dropped. The rarest reasons of many count together as `other`."""
    problems: tuple[str, ...]
    problems_total: int
    lineages: Mapping[str, str]
    """Model to the lineage that was counted. A model without a trainer has no entry."""
    untaught: Mapping[str, int] = field(default_factory=dict)
    """Number of feedbacks that train nothing under the present algorithm, by the reasons."""
    tokens: Mapping[str, int] = field(default_factory=dict)
    """Number of sampled tokens by kind (`headrace_schemas.rules.training.TokenKind`), without evaluations."""

    @property
    def consistent(self) -> bool:
        return not self.problems_total


class TurnAccountBuilder:
    """Builder of a `TurnAccount`. `add` every event of `TOPICS` at least once, in any order, then call `close`."""

    def __init__(self, lineages: Mapping[str, str] | None = None) -> None:
        self._chosen_lineages = dict(lineages or {})
        self._complete = True
        self._turns: dict[TurnKey, TurnState] = defaultdict(TurnState)
        self._trajectories: dict[str, str] = {}
        self._published_trajectories: dict[str, TrajectoryFacts] = {}
        self._experiences: dict[str, ExperienceState] = {}
        self._reports: dict[str, SaveReport] = {}
        self._outcomes: dict[tuple[str, str], LineageOutcomes] = defaultdict(LineageOutcomes)
        """Outcomes by lineage and experience."""
        self._latest_lineages: dict[str, tuple[datetime, str]] = {}
        self._refused: set[str] = set()
        self._feedback = UnusedFeedback()
        self._signals: dict[tuple[str, str], LearnedSignals] = {}
        """Signals that a lineage of a model announced last."""
        self._problems: list[str] = []
        self._problems_total = 0

    def add(self, event: Event) -> None:
        """Update the states of the turns that an event is about. Events of other topics than `TOPICS` are ignored."""
        match event:
            case Turn():
                turn = self._turns[event.tenant, event.turn_id]
                turn.captured, turn.model, turn.session_key = True, event.model, event.session_key
                turn.eval = turn.eval or event.purpose == "eval"
                turn.untrained = turn.untrained or event.untrained
                turn.no_logprobs = no_logprobs_reason(event)
                turn.tokens = token_kind(event), event.usage.completion_tokens
            case Checkpoint():
                if event.learns is not None:
                    self._signals[event.model, event.lineage] = event.learns
            case Trajectory():
                self._add_trajectory(event)
            case Experience():
                self._add_experience(event)
            case TrainingMetrics():
                self._add_report(event)
            case Feedback():
                self._feedback.add(event)
            case DeadLetter():
                if (event.service, event.source_topic) in TURN_ENDING_SOURCES:
                    self._refused.add(event.source_id)

    def _add_trajectory(self, event: Trajectory) -> None:
        if event.trajectory_id in self._published_trajectories:
            return
        facts = TrajectoryFacts.of(event)
        both = sorted(facts.left_out.keys() & {turn_id for branch in event.branches for turn_id in branch.turn_ids})
        if both:
            self._add_problem(f"trajectory {event.trajectory_id} both trains on turn {both[0]} and leaves it out")
        self._published_trajectories[event.trajectory_id] = facts

    def _claim_turns(self) -> None:
        """Assign each turn to the accepted trajectory that contains it, or else to a refused one."""
        refused = {
            name for name, trajectory in self._published_trajectories.items() if trajectory.event_id in self._refused
        }
        for name, trajectory in sorted(self._published_trajectories.items(), key=lambda item: item[0] in refused):
            self._trajectories[name] = trajectory.event_id
            for turn_id in trajectory.turn_ids:
                turn = self._turns[trajectory.tenant, turn_id]
                if turn.trajectory is not None:
                    if name not in refused:
                        self._add_problem(f"turn {turn_id} is in two trajectories, {turn.trajectory} and {name}")
                    continue
                turn.trajectory = name
                turn.left_out = trajectory.left_out.get(turn_id)
                turn.untrained = turn.untrained or trajectory.untrained
                turn.eval = turn.eval or trajectory.eval
                # An ingested trajectory is captured when it arrives; so is one that was refused before its turns came.
                if trajectory.ingested or (name in refused and not turn.captured):
                    turn.no_logprobs = trajectory.no_logprobs.get(turn_id)
                    turn.tokens = trajectory.tokens.get(turn_id, turn.tokens)
                    turn.captured, turn.model, turn.session_key = True, trajectory.model, trajectory.session_key

    def _add_experience(self, event: Experience) -> None:
        experience = self._experiences.get(event.experience_id)
        if experience is None:
            turn_ids = frozenset(event.turn_ids)
            experience = ExperienceState(event.model, event.tenant, event.trajectory_id, turn_ids, event.revision, {})
            self._experiences[event.experience_id] = experience
            for turn_id in experience.turn_ids:
                self._turns[event.tenant, turn_id].experiences.append(event.experience_id)
        elif experience.turn_ids != frozenset(event.turn_ids):
            self._add_problem(f"experience {event.experience_id}: its revisions are about different turns")
        experience.revision = max(experience.revision, event.revision)
        experience.event_ids[event.revision] = event.event_id

    def _add_report(self, event: TrainingMetrics) -> None:
        report = SaveReport(event.lineage, event.account, event.verdicts, event.undone, event.restored)
        if event.event_id in self._reports:
            if self._reports[event.event_id] != report:
                self._add_problem(f"lineage {event.lineage} reported its save {event.account} twice, differently")
            return
        self._reports[event.event_id] = report
        if event.model not in self._latest_lineages or self._latest_lineages[event.model][0] <= event.time:
            self._latest_lineages[event.model] = (event.time, event.lineage)

    def _read_reports(self) -> None:
        """Apply the training reports in the order of the trainer's saves (checkpoints), because an undone revision may
        be trained again later.
        """
        for report in sorted(self._reports.values(), key=lambda report: (report.lineage, report.account)):
            for verdict in report.verdicts:
                self._add_verdict(report.lineage, verdict)
            for undone in report.undone:
                self._undo(report.lineage, undone)
            for restored in report.restored:
                self._restore(report.lineage, restored)

    def _undo(self, lineage: str, undone: RevertedOutcome) -> None:
        if not self._outcomes[lineage, undone.experience_id].undo(undone):
            self._add_missing_cause(
                f"lineage {lineage} undid experience {undone.experience_id} revision {undone.revision}, "
                "which it had not trained"
            )

    def _restore(self, lineage: str, restored: RestoredOutcome) -> None:
        outcomes = self._outcomes.get((lineage, restored.experience_id))
        if outcomes is None or not outcomes.restore(restored):
            self._add_missing_cause(
                f"lineage {lineage} restored experience {restored.experience_id} revision {restored.revision}, "
                "which it had not undone"
            )

    def _add_verdict(self, lineage: str, verdict: TrainingOutcome) -> None:
        outcomes = self._outcomes[lineage, verdict.experience_id]
        if not outcomes.add(verdict.revision, RevisionOutcome.of(verdict)):
            self._add_problem(
                f"experience {verdict.experience_id} revision {verdict.revision} changed lineage {lineage} twice"
            )

    def close(self, *, complete: bool = True) -> TurnAccount:
        """Return the account of all captured turns.

        Args:
            complete: whether the topics still contain every record ever written. Then an event is reported as a
                problem if the turn, trajectory or experience that it refers to is missing.
        """
        self._complete = complete
        lineages = {model: lineage for model, (_, lineage) in self._latest_lineages.items()} | self._chosen_lineages
        self._read_reports()
        self._claim_turns()
        self._check_verdicts()
        self._check_experiences()
        self._check_turns()
        states = collections.Counter(
            self._turn_state(turn_id, turn, lineages) for (_, turn_id), turn in self._turns.items() if turn.captured
        )
        waiting = {name: count for (state, name), count in sorted(states.items()) if state == "waiting"}
        dropped = {name: count for (state, name), count in sorted(states.items()) if state == "dropped"}
        return TurnAccount(
            captured=states.total(),
            trained=states["trained", ""],
            waiting=waiting,
            dropped=most_frequent(dropped),
            problems=tuple(self._problems),
            problems_total=self._problems_total,
            lineages=lineages,
            untaught=self._feedback.count(self._feedback_targets(lineages)),
            tokens=count_tokens(self._turns.values()),
        )

    def _feedback_targets(self, lineages: Mapping[str, str]) -> dict[TurnKey, CapturedTurn]:
        """Return the captured turns with the facts that decide whether feedback about them can be trained."""
        with_logprobs = {
            name
            for name, experience in self._experiences.items()
            if any(self._turns[experience.tenant, turn].no_logprobs is None for turn in experience.turn_ids)
        }
        return {
            name: CapturedTurn(
                turn.session_key,
                "eval" if turn.eval else turn.untrained or turn.left_out or self._foreign_reason(turn, lineages),
                turn.no_logprobs,
                not with_logprobs.isdisjoint(turn.experiences),
                self._signals.get((turn.model, lineages.get(turn.model, ""))),
            )
            for name, turn in self._turns.items()
            if turn.captured
        }

    def _foreign_reason(self, turn: TurnState, lineages: Mapping[str, str]) -> str | None:
        """Return `foreign_version` if all experiences of the turn were dropped for a version of another lineage."""
        lineage = lineages.get(turn.model, "")
        outcomes = [self._lineage_outcomes(lineage, name).outcomes.values() for name in turn.experiences]
        foreign = [any(outcome.dropped == "foreign_version" for outcome in revisions) for revisions in outcomes]
        return "foreign_version" if foreign and all(foreign) else None

    def _turn_state(self, turn_id: str, turn: TurnState, lineages: Mapping[str, str]) -> TurnStatus:
        """Return the state of a turn with its detail, from the latest stage that any of its events shows."""
        in_training = [self._experience_state(name, turn_id, turn, lineages) for name in sorted(turn.experiences)]
        event_id = turn_id if turn.trajectory is None else self._trajectories[turn.trajectory]
        facts = TurnFacts(
            turn.eval, turn.untrained, turn.left_out, turn.trajectory is not None, refused=event_id in self._refused
        )
        statuses = turn_statuses(facts, in_training)
        if len(statuses) > 1:
            dropped, state = statuses[0][1], statuses[-1][0]
            self._add_problem(f"turn {turn_id} is dropped as {dropped} and yet {state} in an experience")
        return statuses[0]

    def _experience_state(self, name: str, turn_id: str, turn: TurnState, lineages: Mapping[str, str]) -> TurnStatus:
        experience = self._experiences[name]
        refused = experience.event_ids.get(experience.revision) in self._refused
        outcomes = self._lineage_outcomes(lineages.get(experience.model), name)
        return outcomes.status(turn_id, experience.revision, turn.no_logprobs, refused=refused)

    def _lineage_outcomes(self, lineage: str | None, experience: str) -> LineageOutcomes:
        outcomes = None if lineage is None else self._outcomes.get((lineage, experience))
        return outcomes or LineageOutcomes()

    def _check_verdicts(self) -> None:
        for (lineage, name), outcomes in self._outcomes.items():
            experience = self._experiences.get(name)
            if experience is None:
                self._add_missing_cause(
                    f"lineage {lineage} has a verdict on experience {name}, which was not published"
                )
            elif any(outcome.turns != experience.turn_ids for outcome in outcomes.outcomes.values()):
                self._add_problem(f"lineage {lineage} has a verdict on experience {name} that names other turns")

    def _check_experiences(self) -> None:
        for name, experience in self._experiences.items():
            if experience.trajectory not in self._trajectories:
                self._add_missing_cause(
                    f"experience {name} is of trajectory {experience.trajectory}, which was not published"
                )
                continue
            tenant, trajectory = experience.tenant, experience.trajectory
            foreign_turns = [turn for turn in experience.turn_ids if self._turns[tenant, turn].trajectory != trajectory]
            if foreign_turns:
                self._add_problem(
                    f"experience {name} names turns that are not of its trajectory: {sorted(foreign_turns)[:3]}"
                )

    def _check_turns(self) -> None:
        for (_, turn_id), turn in self._turns.items():
            if not turn.captured:
                self._add_missing_cause(f"turn {turn_id} was used without having been captured")

    def _add_missing_cause(self, text: str) -> None:
        """Report as a problem that the turn, trajectory or experience to which an event refers is missing on the bus.

        Do nothing if the topics are not complete, because retention may have deleted the record.

        Args:
            text: description of the problem.
        """
        if self._complete:
            self._add_problem(text)

    def add_or_note(self, event: Event, position: str) -> None:
        """Add one event. If the event cannot be processed, report that as a problem of the account."""
        try:
            self.add(event)
        except Exception as error:  # noqa: BLE001 (one malformed record must not hide the account of all others)
            self._add_problem(
                f"{position}: this {type(event).__name__} cannot be accounted for: {type(error).__name__}"
            )

    def _add_problem(self, text: str) -> None:
        self._problems_total += 1
        if len(self._problems) < PROBLEMS_MAX:
            self._problems.append(text)


def turn_account_of(
    events: Iterable[Event], lineages: Mapping[str, str] | None = None, *, complete: bool = True
) -> TurnAccount:
    """Return the account of all `events`. See `TurnAccountBuilder` for the arguments."""
    builder = TurnAccountBuilder(lineages)
    for event in events:
        builder.add(event)
    return builder.close(complete=complete)
