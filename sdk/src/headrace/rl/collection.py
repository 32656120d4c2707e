"""`DataCollector`: which parts of a conversation's record are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import UsageError
from headrace.practice.collecting import Rate, run_and_collect

FIELDS = ("messages", "thoughts", "tool_calls", "rewards", "user_feedback")


class DataCollector:
    """Runs an agent and keeps what it did; `collect_fields` says which parts of the record are wanted."""

    def __init__(self, collect_fields: Mapping[str, bool] | None = None, reward_function: Rate | None = None) -> None:
        unknown = set(collect_fields or ()) - set(FIELDS)
        if unknown:
            raise UsageError(f"collect_fields: no field {min(unknown)!r}; there are {', '.join(FIELDS)}")
        self.collect_fields = dict.fromkeys(FIELDS, True) | dict(collect_fields or {})
        self._rate = reward_function

    def collect(self, agent: Any, user_input: str, user_feedback: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One conversation. `user_feedback` = {"rating": 1 to 5, "comment": ...}; the rating becomes the reward
        `user_satisfaction` = rating / 5, and the sum of all rewards is the feedback about the session."""
        given = dict(user_feedback or {}) if self.collect_fields["user_feedback"] else {}
        record = run_and_collect(agent, user_input, reward_function=self._rate, user_feedback=given)
        hidden = {name for name in FIELDS if not self.collect_fields[name]}
        return {name: value for name, value in record.items() if name not in hidden}
