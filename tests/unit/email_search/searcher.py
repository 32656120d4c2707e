"""A behaviour for `FakeLLM`: a model that calls as a demonstration does."""

from __future__ import annotations

import itertools
import random

from email_search.demonstrations import NONE, Habits, demonstrate
from email_search.queries import Query
from tests.support.fake_llm import Call, Reply


class Searcher:
    """Knows `queries` and no others; of a query's calls one is as the next is, or as `habits` have it."""

    def __init__(self, queries: list[Query], habits: Habits = NONE) -> None:
        self._queries = {query.question: query for query in queries}
        self._habits = habits
        self._numbers = itertools.count()

    def __call__(self, call: Call) -> Reply:
        number = next(self._numbers)
        demonstration = demonstrate(
            self._queries[call.body["messages"][1]["content"]], random.Random(number), self._habits
        )
        choice = {"index": 0, "message": demonstration[-1], "finish_reason": "tool_calls"}
        return Reply({"id": f"chatcmpl-{number}", "object": "chat.completion", "choices": [choice]})
