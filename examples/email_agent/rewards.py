"""How good was it? Plain functions over a finished trajectory; the scorer loads this file and calls them by name.

Each returns a number, or None to abstain when the context lacks what it needs. `context` is what came with feedback.
Nothing is imported from Headrace at run time, so that the file can be read and tested anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_schemas import Trajectory


def answer(trajectory: Trajectory, context: Mapping[str, object]) -> float | None:
    """1 for the expected answer, up to case and punctuation, and 0 for anything else."""
    expected = context.get("expected")
    return None if expected is None else float(same_answer(trajectory.final_answer, str(expected)))


def evidence(trajectory: Trajectory, context: Mapping[str, object]) -> float | None:
    """1 when some tool showed the expected answer: the agent looked in the right place, whatever it then said."""
    expected = context.get("expected")
    if expected is None:
        return None
    shown = [_words(message.text) for message in trajectory.messages if message.role == "tool"]
    return float(any(_contains(words, _words(str(expected))) for words in shown))


def tool_use(trajectory: Trajectory) -> float:
    """Share of the attempted calls that a tool could act on. No call at all is 0: nothing can be known without one."""
    results = [message.text for message in trajectory.messages if message.role == "tool"]
    worked = sum(not text.startswith("error") for text in results)
    malformed = "<tool_call>" in trajectory.final_answer
    attempts = len(results) + malformed
    return worked / attempts if attempts else 0.0


def same_answer(given: str, expected: str) -> bool:
    return _words(given) == _words(expected)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _contains(words: list[str], wanted: list[str]) -> bool:
    starts = range(len(words) - len(wanted) + 1)
    return bool(wanted) and any(words[start : start + len(wanted)] == wanted for start in starts)
