"""What a model wrote to solve a problem: its steps, and whether it has the form that was asked for.

The form, as ReAct has it (Yao et al. 2022, arXiv:2210.03629): lines `Thought: ...` before each call, one call at a
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
    """One message of the model: its text, the arguments of its calls, and what they came to."""

    text: str
    calls: tuple[str, ...] = ()
    results: tuple[str, ...] = ()

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if line.strip()]


@dataclass(frozen=True)
class Solution:
    """The turns of one run."""

    turns: tuple[Turn, ...]

    @property
    def answered(self) -> bool:
        return bool(self.turns) and not self.turns[-1].calls

    @property
    def steps(self) -> int:
        """Lines of thought and calls, without the line of the answer."""
        written = sum(len(turn.lines) + len(turn.calls) for turn in self.turns)
        return written - (self.answered and bool(self.turns[-1].lines))

    @property
    def in_form(self) -> bool:
        """Whether all of it has the form: half of it is none."""
        *calling, last = self.turns or (Turn(""),)
        begun = bool(calling) and all(len(turn.calls) == 1 and follows(turn.text, CALLING) for turn in calling)
        return begun and not last.calls and bool(follows(last.text, ANSWERING))

    def shown(self) -> str:
        """For people."""
        lines = []
        for turn in self.turns:
            lines += turn.lines
            lines += [f"  {_argument(call)} = {result}" for call, result in zip(turn.calls, turn.results, strict=False)]
        return "\n".join(lines)


def of_episode(episode: Episode) -> Solution:
    """What a client saw."""
    said = [dict(message) for message in episode.messages]
    if episode.answer is not None:
        said.append({"role": "assistant", "content": episode.answer})
    calls = [[call["function"]["arguments"] for call in message.get("tool_calls") or ()] for message in said]
    spoken = [(message["role"], message.get("content") or "", made) for message, made in zip(said, calls, strict=True)]
    return Solution(tuple(_turns(spoken)))


def of_trajectory(trajectory: Trajectory) -> Solution:
    """What a reward function sees."""
    spoken = [
        (message.role, message.text, [call.function.arguments for call in message.tool_calls or ()])
        for message in trajectory.messages
    ]
    return Solution(tuple(_turns(spoken)))


def _turns(spoken: Sequence[tuple[str, str, Sequence[str]]]) -> Iterable[Turn]:
    for place, (role, text, calls) in enumerate(spoken):
        if role == "assistant":
            after = spoken[place + 1 : place + 1 + len(calls)]
            yield Turn(text, tuple(calls), tuple(said for who, said, _ in after if who == "tool"))


def _argument(call: str) -> Any:
    try:
        return json.loads(call)[PARAMETER]
    except (ValueError, KeyError, TypeError, RecursionError):
        return call
