"""Reward functions for finished trajectories. The scorer loads this file and calls them by name.

Each returns a number, or None to abstain if the context lacks a fact. `context` contains the facts that were sent with
feedback. The file does not import Headrace at run time, so that it can be tested anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from headrace_schemas import Trajectory


def answer(trajectory: Trajectory, context: Mapping[str, object]) -> float | None:
    """Return 1 for the expected answer, ignoring case and punctuation, else 0."""
    expected = context.get("expected")
    return None if expected is None else float(same_answer(trajectory.final_answer, str(expected)))


def evidence(trajectory: Trajectory, context: Mapping[str, object]) -> float | None:
    """Return 1 if the result of a tool contains the expected answer, whatever the agent answered, else 0."""
    expected = context.get("expected")
    if expected is None:
        return None
    results = [_words(message.text) for message in trajectory.messages if message.role == "tool"]
    return float(any(_contains(words, _words(str(expected))) for words in results))


def tool_use(trajectory: Trajectory) -> float:
    """Return the share of attempted calls that a tool could execute, or 0 without calls, because every question needs a
    call."""
    results = [message.text for message in trajectory.messages if message.role == "tool"]
    worked = sum(not text.startswith("error") for text in results)
    malformed = "<tool_call>" in trajectory.final_answer
    attempts = len(results) + malformed
    return worked / attempts if attempts else 0.0


def same_answer(answer_text: str, expected: str) -> bool:
    return _words(answer_text) == _words(expected)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _contains(words: list[str], phrase: list[str]) -> bool:
    starts = range(len(words) - len(phrase) + 1)
    return bool(phrase) and any(words[start : start + len(phrase)] == phrase for start in starts)
