"""Guards against reward hacking: each says how much of one known exploit a run shows, from 0 (none) to 1.

A guard takes from a reward and never adds to it. So it cannot be played for, and where a run is honest nothing changes.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_schemas import Message

_WORD = re.compile(r"\w+")
_PLEADING = re.compile(
    r"\b(?:(?:this|my|the above) (?:answer|response|solution) (?:deserves|should (?:get|receive|score|be scored))"
    r"|(?:full|maximum|perfect|top|highest) (?:marks|score|points|reward|grade)\b"
    r"|(?:dear|attention|note to(?: the| any)?) (?:judge|grader|evaluator|reviewer)s?\b"
    r"|ignore (?:all |any |the )*(?:previous|prior|above) (?:instructions|rubric|criteria)"
    r"|(?:rate|score|grade) (?:this|me)\b"
    r"|as an? (?:expert|impartial) (?:judge|grader|evaluator)"
    r"|(?:score|rating|verdict|grade)\s*[:=]\s*(?:\d+|pass|correct|a\+))",
    re.IGNORECASE,
)


def guarded(reward: float, *exploits: float) -> float:
    """The reward less the share of it that the worst exploit would have earned. A negative reward stays as it is."""
    worst = max((min(max(exploit, 0.0), 1.0) for exploit in exploits), default=0.0)
    return reward if reward <= 0 else reward * (1 - worst)


def too_long(answer: str, *, length_max: int, over_max: float = 1.0) -> float:
    """0 up to `length_max` characters, then rising to 1 at `over_max` times as much again.

    Stops: an answer that is padded until whoever scores it is tired, or finds what it looks for somewhere in it.
    """
    return min(1.0, max(0, len(answer) - length_max) / (length_max * over_max))


def repetitive(answer: str, *, words: int = 4, share_free: float = 0.2) -> float:
    """How much of the answer says again what it has said: the share of its runs of `words` words that are no news.

    Up to `share_free` is how people write. Stops: the paid phrase, or the right answer, over and over.
    """
    found = [word.casefold() for word in _WORD.findall(answer)]
    runs = Counter(tuple(found[at : at + words]) for at in range(len(found) - words + 1))
    total = sum(runs.values())
    if total < 2:
        return 0.0
    again = 1 - len(runs) / total
    return max(0.0, (again - share_free) / (1 - share_free))


def pleading(answer: str, *, most: int = 1) -> float:
    """Whether the answer speaks to who scores it: names its own score, or tells a judge what to do.

    1 from `most` such phrases on. English. Stops: text that is written for a model that judges, not for the user.
    """
    return min(1.0, len(_PLEADING.findall(answer)) / most)


def tool_spam(messages: Sequence[Message], *, calls_max: int = 20, repeats_free: int = 1) -> float:
    """The larger of: equal calls beyond `repeats_free` repetitions as a share of all, and calls beyond `calls_max`.

    Stops: a bonus for each call, or for each call that works, taken with calls that nobody needs.
    """
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    if not calls:
        return 0.0
    equal = Counter((call.name, _canonical(call.arguments)) for call in calls)
    repeated = sum(max(0, count - 1 - repeats_free) for count in equal.values())
    return max(repeated / len(calls), min(1.0, max(0, len(calls) - calls_max) / calls_max))


def _canonical(arguments: str) -> str:
    """Equal arguments whatever the order of their names and the spaces between."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()
