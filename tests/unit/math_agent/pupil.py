"""A behaviour for `FakeLLM`: a model that goes on as a demonstration does."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable
from typing import Any

from math_agent.demonstrations import NONE, Habits, demonstrate
from math_agent.problems import Problem
from tests.support.fake_llm import Call, Reply


class Pupil:
    """Knows `problems` and no others."""

    def __init__(self, problems: Iterable[Problem], habits: Habits = NONE) -> None:
        self._shown = {
            problem.question: demonstrate(problem, random.Random(problem.id), habits) for problem in problems
        }
        self._numbers = itertools.count()

    def __call__(self, call: Call) -> Reply:
        messages: list[dict[str, Any]] = call.body["messages"]
        message = self._shown[messages[1]["content"]][len(messages)]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        return Reply({"id": f"chatcmpl-{next(self._numbers)}", "object": "chat.completion", "choices": [choice]})
