"""`DataCollector`: run an agent and return selected fields of the conversation's record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import UsageError
from headrace.practice.arguments import check_names, yes_or_no
from headrace.practice.collecting import Rate, run_and_collect

FIELDS = ("messages", "thoughts", "tool_calls", "rewards", "user_feedback")


class DataCollector:
    """Collector of conversations. `collect_fields` selects the fields of the records."""

    def __init__(self, collect_fields: Mapping[str, bool] | None = None, reward_function: Rate | None = None) -> None:
        selected_fields = collect_fields or {}
        check_names("collect_fields", selected_fields, FIELDS)
        self.collect_fields = dict.fromkeys(FIELDS, True)
        self.collect_fields |= {
            name: yes_or_no(f"collect_fields.{name}", value) for name, value in selected_fields.items()
        }
        self._rate = reward_function

    def collect(self, agent: Any, user_input: str, user_feedback: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Run one conversation and return its record.

        Args:
            user_feedback: {"rating": 1 to 5, "comment": ...}. The rating becomes the reward `user_satisfaction` =
                rating / 5. The sum of all rewards is sent as feedback about the session.
        """
        if user_feedback and not self.collect_fields["user_feedback"]:
            raise UsageError("user_feedback: collect_fields.user_feedback is False; leave one of them out")
        record = run_and_collect(agent, user_input, reward_function=self._rate, user_feedback=user_feedback)
        hidden = {name for name in FIELDS if not self.collect_fields[name]}
        return {name: value for name, value in record.items() if name not in hidden}
