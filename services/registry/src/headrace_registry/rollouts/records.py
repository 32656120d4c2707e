"""The record of a session that metrics read: the events about it, as they were known at some time."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from headrace_schemas import Feedback, Message, Reward, Trajectory, Turn


@dataclass(frozen=True, slots=True)
class SessionRecord:
    """The events of one session, each in the order of its topic."""

    session_key: str
    turns: tuple[Turn, ...] = ()
    trajectories: tuple[Trajectory, ...] = ()
    rewards: tuple[Reward, ...] = ()
    feedback: tuple[Feedback, ...] = ()

    def as_of(self, time: datetime) -> SessionRecord:
        """Return the record as it was known at `time` by the producers' clocks."""
        return SessionRecord(
            self.session_key,
            tuple(event for event in self.turns if event.time <= time),
            tuple(event for event in self.trajectories if event.time <= time),
            tuple(event for event in self.rewards if event.time <= time),
            tuple(event for event in self.feedback if event.time <= time),
        )

    @property
    def standing_rewards(self) -> tuple[Reward, ...]:
        """The current reward of each source on each trajectory or turn: its highest revision, whatever the outcome."""
        latest: dict[tuple[str, str | None, int | None, str], Reward] = {}
        for reward in self.rewards:
            subject = reward.trajectory_id, reward.turn_id, reward.choice, reward.source
            if subject not in latest or reward.revision >= latest[subject].revision:
                latest[subject] = reward
        return tuple(latest.values())

    @property
    def standing_feedback(self) -> tuple[Feedback, ...]:
        """The last feedback of each rater of a source on each target, without withdrawn feedback and feedback without a
        value.

        An edit or a preference has no value and leaves the value that was given to the same answer.
        """
        latest: dict[tuple[object, ...], Feedback] = {}
        for item in self.feedback:
            if item.about == "value" and (item.value is not None or item.label is not None or item.withdrawn):
                target = item.level, tuple(sorted(item.msg_ids)), item.choice
                latest[item.source, item.metric, item.rater, *target] = item
        return tuple(item for item in latest.values() if item.value is not None and not item.withdrawn)

    @property
    def dialogue(self) -> tuple[Message, ...]:
        """The longest conversation of the session with the answer at its end; empty without turns."""
        if not self.turns:
            return ()
        longest = max(self.turns, key=lambda turn: len(turn.messages))
        return (*longest.messages, longest.choices[0].message)

    @property
    def answers(self) -> tuple[Message, ...]:
        """All answers of the model: each choice of each turn."""
        return tuple(choice.message for turn in self.turns for choice in turn.choices)
