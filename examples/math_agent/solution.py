"""Solution of a problem as a model wrote it: its steps, and whether it has the expected form.

The form is that of ReAct (Yao et al. 2022, arXiv:2210.03629): lines `Thought: ...` before each call, one call at a
time, and a last line `Answer: 29`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headrace.rewards import follows
from math_agent.calculator import PARAMETER

if TYPE_CHECKING:
    from example_parts.react import Episode
    from headrace_schemas import Trajectory

THOUGHT, ANSWER = "Thought: ", "Answer: "
CALLING = rf"{THOUGHT}[^\n]+(\n{THOUGHT}[^\n]+)*"
ANSWERING = rf"({THOUGHT}[^\n]+\n)*{ANSWER}-?\d+"


@dataclass(frozen=True)
class Turn:
    """One message of the model: its text, the arguments of its calls, and their results."""

    text: str
    calls: tuple[str, ...] = ()
    results: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()]


@dataclass(frozen=True)
class Solution:
    """Turns of one run."""

    turns: tuple[Turn, ...]

    @property
    def has_answer(self) -> bool:
        return bool(self.turns) and not self.turns[-1].calls

    @property
    def steps(self) -> int:
        """Number of thoughts and calls, without the line of the answer."""
        written = sum(len(turn.lines) + len(turn.calls) for turn in self.turns)
        return written - (self.has_answer and bool(self.turns[-1].lines))

    @property
    def in_form(self) -> bool:
        """Whether the whole solution has the expected form."""
        *calling, last = self.turns or (Turn(""),)
        begun = bool(calling) and all(len(turn.calls) == 1 and follows(turn.text, CALLING) for turn in calling)
        return begun and not last.calls and bool(follows(last.text, ANSWERING))

    def as_text(self) -> str:
        """Return the solution as text for people."""
        lines = []
        for turn in self.turns:
            lines += turn.lines
            lines += [f"  {_argument(call)} = {result}" for call, result in zip(turn.calls, turn.results, strict=False)]
        return "\n".join(lines)


def of_episode(episode: Episode) -> Solution:
    """Return the solution in an episode of a client."""
    messages = [dict(message) for message in episode.messages]
    if episode.answer is not None:
        messages.append({"role": "assistant", "content": episode.answer})
    calls = [[call["function"]["arguments"] for call in message.get("tool_calls") or ()] for message in messages]
    parts = [
        (message["role"], message.get("content") or "", arguments)
        for message, arguments in zip(messages, calls, strict=True)
    ]
    return Solution(tuple(_turns(parts)))


def of_trajectory(trajectory: Trajectory) -> Solution:
    """Return the solution in a trajectory of a reward function."""
    parts = [
        (message.role, message.text, [call.function.arguments for call in message.tool_calls or ()])
        for message in trajectory.messages
    ]
    return Solution(tuple(_turns(parts)))


def _turns(parts: Sequence[tuple[str, str, Sequence[str]]]) -> Iterable[Turn]:
    for number, (role, text, calls) in enumerate(parts):
        if role == "assistant":
            after = parts[number + 1 : number + 1 + len(calls)]
            yield Turn(text, tuple(calls), tuple(result for next_role, result, _ in after if next_role == "tool"))


def _argument(call: str) -> Any:
    try:
        return json.loads(call)[PARAMETER]
    except (ValueError, KeyError, TypeError, RecursionError):
        return call
