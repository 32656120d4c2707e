"""Conversations for the warm-up: a clerk that knows the tool for every query, but has bad habits.

The habits determine where the base model starts. The model imitates them as well as the right calls, and learns from
comparisons of its own runs which of them are better.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from email_search.queries import RELEVANT, Kind, Query
from email_search.tools import LIMIT, SYSTEM, TOOLS

Message = dict[str, Any]

INVENTED: Mapping[str, str] = {"search_mail": "query", "search_all": "text"}
"""Tools that do not exist, with their parameters."""
CONFUSED: Mapping[Kind, tuple[str, ...]] = {
    "sender": ("find_contact", "search_folder"),
    "folder": ("search_topic", "search_files"),
    "topic": ("search_folder", "search_files"),
    "day": ("search_topic", "search_folder"),
    "file": ("search_topic", "search_folder"),
}
"""Tools that are mistaken for the right one."""
FEW, MANY = (2, 3), 9
"""Limits that miss mails, and one that finds too many."""


@dataclass(frozen=True)
class Habits:
    """Probabilities of the bad habits of a conversation, which shows at most one."""

    invented: float = 0.0
    """Calling a tool that does not exist."""
    confused: float = 0.0
    """Calling the wrong tool."""
    insufficient: float = 0.0
    """Requesting too few mails."""
    excessive: float = 0.0
    """Requesting too many mails."""


NONE = Habits()


def demonstrate(query: Query, rng: random.Random, habits: Habits) -> list[Message]:
    """Return a whole conversation about `query`: the question and the call."""
    name, limit, drawn = query.tool, RELEVANT, rng.random()
    if (drawn := drawn - habits.invented) < 0:
        name = rng.choice(sorted(INVENTED))
    elif (drawn := drawn - habits.confused) < 0:
        name = rng.choice(CONFUSED[query.kind])
    elif (drawn := drawn - habits.insufficient) < 0:
        limit = rng.choice(FEW)
    elif drawn - habits.excessive < 0:
        limit = MANY
    parameter = INVENTED[name] if name in INVENTED else TOOLS[name].parameter
    function = {"name": name, "arguments": json.dumps({parameter: query.about, LIMIT: limit})}
    call = {"id": "call_1", "type": "function", "function": function}
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": query.question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
