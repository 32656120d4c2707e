"""Conversations for the warm-up: a clerk who knows the tool for every query, and has bad habits.

The habits decide where the base model starts. It copies them as faithfully as the right way, and learns from
comparisons of its own runs which of them pays.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from email_search.queries import RELEVANT, Kind, Query
from email_search.react import SYSTEM
from email_search.tools import LIMIT, TOOLS

Message = dict[str, Any]

INVENTED: Mapping[str, str] = {"search_mail": "query", "search_all": "text"}
"""Tools that there are not, and their parameters."""
CONFUSED: Mapping[Kind, tuple[str, ...]] = {
    "sender": ("find_contact", "search_folder"),
    "folder": ("search_topic", "search_files"),
    "topic": ("search_folder", "search_files"),
    "day": ("search_topic", "search_folder"),
    "file": ("search_topic", "search_folder"),
}
"""Tools that are taken for the right one."""
FEW, MANY = (2, 3), 9
"""Limits that miss mails, and one that finds too many."""


@dataclass(frozen=True)
class Habits:
    """How often a conversation shows what; one of them at most."""

    invented: float = 0.0
    """Calls a tool that there is not."""
    confused: float = 0.0
    """Takes the wrong tool."""
    few: float = 0.0
    """Asks for too few mails."""
    many: float = 0.0
    """Asks for too many."""


NONE = Habits()


def demonstrate(query: Query, rng: random.Random, habits: Habits) -> list[Message]:
    """A whole conversation about `query`: the question and the call."""
    name, limit, drawn = query.tool, RELEVANT, rng.random()
    if (drawn := drawn - habits.invented) < 0:
        name = rng.choice(sorted(INVENTED))
    elif (drawn := drawn - habits.confused) < 0:
        name = rng.choice(CONFUSED[query.kind])
    elif (drawn := drawn - habits.few) < 0:
        limit = rng.choice(FEW)
    elif drawn - habits.many < 0:
        limit = MANY
    parameter = INVENTED[name] if name in INVENTED else TOOLS[name].parameter
    function = {"name": name, "arguments": json.dumps({parameter: query.about, LIMIT: limit})}
    call = {"id": "call_1", "type": "function", "function": function}
    return [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": query.question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
