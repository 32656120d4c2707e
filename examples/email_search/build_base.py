"""Build the base model: a Qwen3 of 0.4 million parameters, its tokenizer, and a warm-up on conversations of a clerk
with bad habits.

    python -m email_search.build_base --cache ~/.cache/headrace/email_search

prints the model's folder. The folder is named by a digest of all inputs and reused by the next run.

The habits determine where the base model starts. The model imitates them as well as the right calls, and learns from
comparisons of its own runs which of them are better.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from email_agent import mailbox
from email_search import queries
from email_search.queries import DEFINITIONS, LIMIT, RELEVANT, SYSTEM, TOOLS, Kind, Query, stream
from example_parts import base_model
from example_parts.base_model import Lesson

if TYPE_CHECKING:
    from tokenizers import Tokenizer

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
VOCABULARY = 640
"""Vocabulary size. Bytes, markup and the words of queries with their merges need about 600 entries."""
_PARAMETERS = {**{name: tool.parameter for name, tool in TOOLS.items()}, **INVENTED}
RECURRING = (
    *(base_model.call_opening(*tool) for tool in _PARAMETERS.items()),
    f'", {json.dumps(LIMIT)}: ',
    "}}",
    *TOOLS,
)
"""Parts of tool calls that are one token each."""
_QUESTION_TEXTS = " ".join((*queries.OPENINGS, *itertools.chain(*queries.WORDINGS.values())))
WORDS = (*mailbox.ALL, *sorted(set(re.findall(r"[A-Za-z]+", _QUESTION_TEXTS))))


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


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Train a tokenizer on users' texts."""
    return base_model.train_tokenizer(texts, WORDS, RECURRING, VOCABULARY)


HABITS = Habits(invented=0.14, confused=0.28, insufficient=0.1, excessive=0.02)
"""Habits of the base model, which calls the right tool 6 times in 10, with all arguments right 5 times, and finds 3 of
6 mails."""


@dataclass(frozen=True)
class Schedule(base_model.Schedule):
    """The common schedule, with the settings of this agent."""

    habits: Habits = HABITS
    """Habits in the later conversations."""
    mailboxes: int = 8


def conversations(schedule: Schedule, seed: int) -> list[list[Message]]:
    """Return all conversations of the warm-up, in order. Its mailboxes have negative seeds, which agents never use."""
    rng = random.Random(f"warm-up {seed}")
    boxes = (mailbox.generate(-1 - seed * schedule.mailboxes - number) for number in range(schedule.mailboxes))
    alternating = zip(*(stream(box, "warm_up", seed) for box in boxes), strict=True)
    shown = itertools.islice(itertools.chain.from_iterable(alternating), schedule.shown)
    return [
        demonstrate(query, rng, NONE if number < schedule.shown_right else schedule.habits)
        for number, query in enumerate(shown)
    ]


LESSON = Lesson(
    name="email_search",
    folder=Path(__file__).parent,
    modules=(
        "../email_agent/mailbox", "queries", "build_base",
    ),
    definitions=DEFINITIONS,
    schedule=Schedule(),
    conversations=conversations,
    tokenizer=train_tokenizer,
)  # fmt: skip


if __name__ == "__main__":
    LESSON.command()
