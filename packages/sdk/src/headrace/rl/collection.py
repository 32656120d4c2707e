"""`DataCollector`: which parts of a conversation's record are wanted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import UsageError
from headrace.practice.arguments import check_names, yes_or_no
from headrace.practice.collecting import Rate, run_and_collect

FIELDS = ("messages", "thoughts", "tool_calls", "rewards", "user_feedback")


class DataCollector:
    """Runs an agent and keeps what it did; `collect_fields` says which parts of the record are wanted."""

    def __init__(self, collect_fields: Mapping[str, bool] | None = None, reward_function: Rate | None = None) -> None:
        chosen = collect_fields or {}
        check_names("collect_fields", chosen, FIELDS)
        self.collect_fields = dict.fromkeys(FIELDS, True)
        self.collect_fields |= {name: yes_or_no(f"collect_fields.{name}", value) for name, value in chosen.items()}
        self._rate = reward_function

    def collect(self, agent: Any, user_input: str, user_feedback: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """One conversation. `user_feedback` = {"rating": 1 to 5, "comment": ...}; the rating becomes the reward
        `user_satisfaction` = rating / 5, and the sum of all rewards is the feedback about the session."""
        if user_feedback and not self.collect_fields["user_feedback"]:
            raise UsageError("user_feedback: collect_fields.user_feedback is False; leave one of them out")
        record = run_and_collect(agent, user_input, reward_function=self._rate, user_feedback=user_feedback)
        hidden = {name for name in FIELDS if not self.collect_fields[name]}
        return {name: value for name, value in record.items() if name not in hidden}
