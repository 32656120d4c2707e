"""Changes that each kind of event makes to the loaded rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from headrace_console.read_model import tables
from headrace_console.read_model.packing import pack_id
from headrace_console.read_model.rows import EDITS_MAX, Names, SessionRow, TurnRow
from headrace_console.read_model.side_rows import RewardKey
from headrace_console.read_model.status import add_outcome, overall_advantage
from headrace_console.read_model.verdicts import verdict_of
from headrace_runtime.clock import epoch_ms
from headrace_schemas import (
    DeadLetter,
    DeadLetterDecision,
    Event,
    Experience,
    Feedback,
    RestoredOutcome,
    RevertedOutcome,
    Reward,
    TrainingMetrics,
    TrainingOutcome,
    Trajectory,
    Turn,
)
from headrace_schemas.rules.training import TURN_ENDING_SOURCES, TrajectoryFacts, no_logprobs_reason
from headrace_schemas.values.ids import derived_id

if TYPE_CHECKING:
    from headrace_console.read_model.batch import Batch

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TITLE_LENGTH = 80
_ERROR_LENGTH_MAX = 300
_EDIT_DIGITS = 8
_THUMB_THRESHOLD = 0.5
"""Threshold of feedback values: a higher value is a thumb up, a lower value a thumb down."""


class EventEffects:
    """Applies events of each kind to the loaded rows of a batch."""

    def __init__(self, batch: Batch, names: Names, *, titles: bool) -> None:
        self._batch = batch
        self._names = names
        self._titles = titles

    def apply(self, event: Event, partition: int, offset: int) -> None:
        """Apply one event. Events of other topics have no effect."""
        match event:
            case Turn():
                self._add_turn(event, partition, offset)
            case Trajectory():
                self._add_trajectory(event, partition, offset)
            case Experience():
                self._add_experience(event, partition, offset)
            case Reward():
                self._add_reward(event, partition, offset)
            case Feedback() if event.level != "task":
                self._add_feedback(event, partition, offset)
            case TrainingMetrics():
                self._add_report(event)
            case DeadLetter():
                self._add_letter(event, partition, offset)
            case DeadLetterDecision():
                self._add_decision(event)

    def _number(self, text: str | None) -> int | None:
        return None if text is None else self._names.shared_number(text)

    def _session(self, event: Turn | Trajectory | Experience | Reward | Feedback) -> SessionRow:
        return self._batch.session_of(event)

    def _turn(self, tenant: str, turn_id: str, session: SessionRow) -> TurnRow:
        """Return the row of a turn, created as a stub if the turn's event was not read yet."""
        turn = self._batch.turns.add(pack_id(turn_id), self._names.number(tenant))
        turn.session = turn.session or self._batch.session_of_turn(turn_id, session).id
        turn.refused = turn.refused or turn.name in self._batch.side.refusals
        return turn

    def _add_turn(self, event: Turn, partition: int, offset: int) -> None:
        names, session = self._names, self._session(event)
        turn = self._turn(event.tenant, event.turn_id, session)
        turn.session = self._batch.session_of_turn(event.turn_id, session).id
        turn.model, turn.version = names.number(event.model), names.shared_number(event.version, is_open=True)
        turn.at_ms, turn.partition, turn.log_offset = epoch_ms(event.time), partition, offset
        turn.prompt_tokens, turn.sampled_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
        turn.eval = turn.eval or event.purpose == "eval"
        turn.untrained = turn.untrained or self._number(event.untrained)
        turn.no_logprobs = self._number(no_logprobs_reason(event))
        turn.finish = names.shared_number(event.choices[0].finish_reason)
        turn.choices = len(event.choices)
        turn.latency_ms = max(0, turn.at_ms - epoch_ms(event.started_at))
        arm = event.assignment.arm if event.assignment is not None else None
        turn.arm = self._number(arm)
        if self._titles and event.extends is None and (not session.began_ms or turn.at_ms <= session.began_ms):
            session.title = _first_words(event)
        if turn.at_ms >= session.last_ms:
            session.version = turn.version
        self._update_session(session, event, turn.at_ms)
        session.flags |= tables.FLAGS.get(arm or "", 0)

    def _update_session(self, session: SessionRow, event: Turn | Trajectory, at_ms: int) -> None:
        session.session_id, session.model = event.session_id, self._names.number(event.model)
        session.task_id = event.task_id or session.task_id
        session.began_ms = min(session.began_ms or at_ms, at_ms)
        session.last_ms = max(session.last_ms, at_ms)
        if event.purpose == "eval":
            session.flags |= tables.FLAGS["eval"]

    def _add_trajectory(self, event: Trajectory, partition: int, offset: int) -> None:
        session, trajectory = self._batch.reward_target(event)
        if trajectory.log_offset >= 0:
            return
        facts, names = TrajectoryFacts.of(event), self._names
        trajectory.session, trajectory.model = session.id, names.number(event.model)
        trajectory.partition, trajectory.log_offset = partition, offset
        trajectory.eval, trajectory.ingested = facts.eval, facts.ingested
        trajectory.untrained = self._number(facts.untrained)
        trajectory.refused = trajectory.name in self._batch.side.refusals
        turns = {turn_id: self._turn(event.tenant, turn_id, session) for turn_id in facts.turn_ids}
        trajectory.turns = tuple(turn.id for turn in turns.values())
        trajectory.left_out = self._reason_numbers(facts.left_out, turns)
        trajectory.no_logprobs = self._reason_numbers(facts.no_logprobs, turns)
        at_ms = epoch_ms(event.started_at)
        for turn_id, turn in turns.items():
            turn.trajectories = (*turn.trajectories, trajectory.id)
            if not turn.is_captured:
                turn.at_ms = turn.at_ms or at_ms
                turn.sampled_tokens = facts.tokens.get(turn_id, ("", 0))[1]
        if facts.ingested:
            if event.versions and at_ms >= session.last_ms:
                session.version = names.shared_number(event.versions[-1], is_open=True)
            self._update_session(session, event, at_ms)

    def _reason_numbers(self, reasons: Mapping[str, str], turns: Mapping[str, TurnRow]) -> Mapping[int, int]:
        return {turns[turn_id].id: self._names.shared_number(text) for turn_id, text in reasons.items()}

    def _add_experience(self, event: Experience, partition: int, offset: int) -> None:
        experience, session = self._batch.experiences.add(pack_id(event.experience_id)), self._session(event)
        if not experience.session:
            experience.session = session.id
            turns = [self._turn(event.tenant, turn_id, session) for turn_id in dict.fromkeys(event.turn_ids)]
            experience.turns = tuple(turn.id for turn in turns)
            for turn in turns:
                turn.experiences = (*turn.experiences, experience.id)
        if event.revision <= experience.revision:
            return
        experience.revision, experience.event = event.revision, pack_id(event.event_id)
        experience.partition, experience.log_offset = partition, offset
        experience.reward, experience.no_reward = event.reward, self._number(event.no_reward)
        experience.weight = event.weight
        experience.refused = experience.event in self._batch.side.refusals
        session.reward = event.reward

    def _add_reward(self, event: Reward, partition: int, offset: int) -> None:
        session, trajectory = self._batch.reward_target(event)
        turn = 0 if event.turn_id is None else self._turn(event.tenant, event.turn_id, session).id
        choice = -1 if event.choice is None else event.choice
        key = RewardKey(trajectory.id, turn, choice, self._names.shared_number(event.source, is_open=True))
        values = {
            "tenant": session.tenant,
            "revision": event.revision,
            "outcome": self._names.shared_number(event.outcome),
            "value": event.value,
            "at_ms": epoch_ms(event.time),
            "partition": partition,
            "log_offset": offset,
        }
        if self._batch.side.set_reward(key, values):
            session.flags |= tables.FLAGS.get(event.outcome, 0)

    def _add_feedback(self, event: Feedback, partition: int, offset: int) -> None:
        session = self._batch.session_of(event, is_news=False)
        self._batch.side.add_feedback(session, partition, offset, epoch_ms(event.time))
        verdict = verdict_of(event)
        if verdict is not None:
            turn = self._turn(event.tenant, event.msg_ids[0], session).id if event.msg_ids else 0
            self._batch.side.add_verdict(verdict, session, turn, offset)
        if event.feedback_kind == "edit":
            self._update_edits(session, event)
        if event.value is not None:
            session.thumb = (event.value > _THUMB_THRESHOLD) - (event.value < _THUMB_THRESHOLD)

    def _update_edits(self, session: SessionRow, event: Feedback) -> None:
        """Add an edit (a corrected answer) to the session, or remove it if the event withdraws it.

        The session has the flag `edited` while one of its edits is valid.
        """
        edit = derived_id("edit", event.source, event.rater, *event.answer)[:_EDIT_DIGITS]
        other_edits = [other for other in session.edits if other != edit]
        session.edits = other_edits if event.withdrawn else [*other_edits, edit][-EDITS_MAX:]
        session.flags = (session.flags & ~tables.FLAGS["edited"]) | (tables.FLAGS["edited"] if session.edits else 0)

    def _add_report(self, event: TrainingMetrics) -> None:
        names, side = self._names, self._batch.side
        save = self._batch.save_of(event)
        if not side.is_new_step(*save):
            return
        items: list[TrainingOutcome | RevertedOutcome | RestoredOutcome] = [
            *event.verdicts,
            *event.undone,
            *event.restored,
        ]
        for item in items:
            experience = self._batch.experiences.add(pack_id(item.experience_id))
            experience.read_day = self._batch.day
            add_outcome(experience, save, item, names)
            if isinstance(item, TrainingOutcome) and item.dropped is None:
                side.trained.append(
                    {
                        "lineage": save[0],
                        "save": save[1],
                        "experience": experience.id,
                        "revision": item.revision,
                        "advantage": overall_advantage(item),
                    }
                )
        dropped = Counter(verdict.reason_name for verdict in event.verdicts if verdict.reason_name is not None)
        side.steps[save] = {
            "lineage": save[0],
            "account": save[1],
            "model": names.number(event.model),
            "step": event.step,
            "version": None if event.version is None else names.shared_number(event.version, is_open=True),
            "at_us": (event.time - _EPOCH) // timedelta(microseconds=1),
            "reward": event.metrics.get("reward_mean"),
            "trained": sum(verdict.dropped is None for verdict in event.verdicts),
            "dropped": dropped,
            "stopped": event.stopped,
        }

    def _add_letter(self, event: DeadLetter, partition: int, offset: int) -> None:
        names, letter = self._names, self._batch.letters.add(pack_id(event.event_id))
        letter.subject, letter.service = pack_id(event.source_id), names.shared_number(event.service)
        letter.topic, letter.reason = names.shared_number(event.source_topic), names.shared_number(event.reason)
        letter.error, letter.at_ms = event.error[:_ERROR_LENGTH_MAX], epoch_ms(event.time)
        letter.partition, letter.log_offset = partition, offset
        letter.read_day = self._batch.day
        if (event.service, event.source_topic) in TURN_ENDING_SOURCES:
            self._refuse(letter.subject)

    def _add_decision(self, event: DeadLetterDecision) -> None:
        letter = self._batch.letters.add(pack_id(event.dead_letter_id))
        letter.read_day = self._batch.day
        if event.number > letter.decisions:
            letter.decisions, letter.state = event.number, tables.LETTER_STATES.index(event.action)

    def _refuse(self, name: bytes) -> None:
        batch = self._batch
        batch.side.refusals.add(name)
        for turn in [row for row in batch.turns if row.name == name]:
            turn.refused = True
            batch.sessions[turn.session].flags |= tables.FLAGS["refused"]
        trajectory = batch.trajectories.find(name)
        if trajectory is not None:
            trajectory.refused = True
        for experience in batch.experiences:
            experience.refused = experience.refused or experience.event == name


def _first_words(event: Turn) -> str:
    """Return the beginning of the first message of the user, on one line."""
    text = next((message.text for message in event.messages if message.role == "user"), event.messages[0].text)
    return " ".join(text[: 4 * TITLE_LENGTH].split())[:TITLE_LENGTH]
