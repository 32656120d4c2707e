"""What a metric sees of a session: the events about it, as they were known at some moment."""

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

    def as_of(self, moment: datetime) -> SessionRecord:
        """The same as it was known then, by the producers' clocks: what a reading at that moment would have seen."""
        return SessionRecord(
            self.session_key,
            tuple(one for one in self.turns if one.time <= moment),
            tuple(one for one in self.trajectories if one.time <= moment),
            tuple(one for one in self.rewards if one.time <= moment),
            tuple(one for one in self.feedback if one.time <= moment),
        )

    @property
    def standing_rewards(self) -> tuple[Reward, ...]:
        """The valid word of each source on each trajectory or turn: its highest revision, whatever the outcome."""
        last: dict[tuple[str, str | None, int | None, str], Reward] = {}
        for reward in self.rewards:
            about = reward.trajectory_id, reward.turn_id, reward.choice, reward.source
            if about not in last or reward.revision >= last[about].revision:
                last[about] = reward
        return tuple(last.values())

    @property
    def standing_feedback(self) -> tuple[Feedback, ...]:
        """The last word of each rater of a source on each target, without what was withdrawn and what carries no value.

        An edit or a preference is none, and leaves the value that was said of the same answer.
        """
        last: dict[tuple[object, ...], Feedback] = {}
        for one in self.feedback:
            if one.about == "value" and (one.value is not None or one.label is not None or one.withdrawn):
                target = one.level, tuple(sorted(one.msg_ids)), one.choice
                last[one.source, one.metric, one.rater, *target] = one
        return tuple(one for one in last.values() if one.value is not None and not one.withdrawn)

    @property
    def dialogue(self) -> tuple[Message, ...]:
        """The longest conversation of the session with the answer at its end; empty without turns."""
        if not self.turns:
            return ()
        longest = max(self.turns, key=lambda turn: len(turn.messages))
        return (*longest.messages, longest.choices[0].message)

    @property
    def answers(self) -> tuple[Message, ...]:
        """What the model wrote, each choice of each turn."""
        return tuple(choice.message for turn in self.turns for choice in turn.choices)
