"""Behaviours for `FakeLLM`: a model that knows the way, and one that does not."""

from __future__ import annotations

import itertools
import random
from typing import Any

from email_agent.demonstrations import demonstrate
from email_agent.mailbox import Mailbox
from email_agent.tasks import tasks
from email_agent.tools import Mailtools
from tests.support.fake_llm import Behaviour, Call, Reply, say


class Clerk:
    """Answers each call as the right way would go on from there."""

    def __init__(self, box: Mailbox, tools: Mailtools) -> None:
        all_tasks = (*tasks(box, "train"), *tasks(box, "held_out"))
        self._right = {task.question: demonstrate(task, tools, random.Random(0), lapses=0.0) for task in all_tasks}
        self._numbers = itertools.count()

    def __call__(self, call: Call) -> Reply:
        messages: list[dict[str, Any]] = call.body["messages"]
        message = self._right[messages[1]["content"]][len(messages)]
        choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
        return Reply({"id": f"chatcmpl-{next(self._numbers)}", "object": "chat.completion", "choices": [choice]})


def clueless() -> Behaviour:
    return say("unknown")
