"""Word problems of several steps, the calculator that solves them, and solutions as a model wrote them.

The form is that of ReAct (Yao et al. 2022, arXiv:2210.03629): lines `Thought: ...` before each call, one call at a
time, and a last line `Answer: 29`.

The agent: its system prompt and its tool, with the loop that all examples share.
"""

from __future__ import annotations

import ast
import hashlib
import itertools
import json
import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from example_parts.react import ERROR, Agent, WrongCall, definition, only_argument
from headrace.rewards import follows

if TYPE_CHECKING:
    from example_parts.react import Episode
    from headrace_schemas import Trajectory

NAME, PARAMETER = "calculator", "expression"
LENGTH_MAX = 64
"""Maximum number of characters of an expression."""
DEFINITIONS = [definition(NAME, "Calculate with whole numbers.", PARAMETER, "For example 24 + 13.")]

_BY_SIGN: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}
THOUGHT, ANSWER = "Thought: ", "Answer: "
CALLING = rf"{THOUGHT}[^\n]+(\n{THOUGHT}[^\n]+)*"
ANSWERING = rf"({THOUGHT}[^\n]+\n)*{ANSWER}-?\d+"
Split = Literal["warm_up", "train", "gate", "audit"]
"""Sets of problems: the base model's warm-up, the agent's own traffic, the gate, which decides about versions, and the
audit, which only measures."""
SPLITS: tuple[Split, ...] = Split.__args__  # type: ignore[attr-defined]

NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Karin", "Leon", "Mia", "Nora",
    "Oscar", "Paula",
)  # fmt: skip
THINGS = ("apples", "books", "cards", "coins", "eggs", "marbles", "nuts", "pens", "shells", "stamps")
ORDINALS: Mapping[int, tuple[str, ...]] = {2: ("First", "Last"), 3: ("First", "Next", "Last")}
"""First words of the changes of a problem, by their number."""
VERBS: Mapping[str, tuple[str, ...]] = {"+": ("buys", "finds", "picks"), "-": ("loses", "sells", "eats")}
RESULT: Mapping[str, Callable[[int, int], int]] = {
    "+": lambda amount, number: amount + number,
    "-": lambda amount, number: amount - number,
    "*": lambda amount, number: amount * number,
}
HELD_MAX = 199
"""Largest number in a problem. Numbers up to this one are single tokens."""
_LEAST = 2
"""Smallest number in a change."""


class Calculator:
    """Calculator with + - * and brackets."""

    def call(self, name: str, arguments: str) -> str:
        """Execute a model's call. For an invalid call return a text that begins with `ERROR`."""
        try:
            if name != NAME:
                raise WrongCall(f"no tool {name}")
            return str(calculate(only_argument(arguments, PARAMETER)))
        except WrongCall as problem:
            return f"{ERROR}{problem}"


def calculate(expression: str) -> int:
    """Return the value of an expression. Raises `WrongCall` unless it is a sum, difference or product of whole
    numbers."""
    if len(expression) > LENGTH_MAX:
        raise WrongCall(f"more than {LENGTH_MAX} characters")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ValueError, RecursionError):  # a null character is a ValueError
        raise WrongCall("not an expression") from None


def _value(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand)
    if isinstance(node, ast.BinOp) and type(node.op) in _BY_SIGN:
        return _BY_SIGN[type(node.op)](_value(node.left), _value(node.right))
    raise WrongCall("only whole numbers with + - * and brackets")


SYSTEM = "Solve the problem: one thought, one call, again. End with Answer and the number."
TURNS_MAX = 8
"""Limit of model calls: three calls, each repeated, an answer, and one invalid call."""
AGENT = Agent(SYSTEM, DEFINITIONS, TURNS_MAX)


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


@dataclass(frozen=True)
class Change:
    """One sentence of a problem."""

    ordinal: str
    sign: str
    number: int
    sentence: str


@dataclass(frozen=True)
class Problem:
    """A question with one right answer. Each change needs two steps: a thought and a call."""

    id: str
    kind: str
    name: str
    item_name: str
    start: int
    changes: tuple[Change, ...]

    @property
    def question(self) -> str:
        sentences = " ".join(change.sentence for change in self.changes)
        return f"{self.opening} {sentences} How many {self.item_name} are there now?"

    @property
    def opening(self) -> str:
        return f"{self.name} has {self.start} {self.item_name}."

    @property
    def expected(self) -> int:
        amount = self.start
        for change in self.changes:
            amount = RESULT[change.sign](amount, change.number)
        return amount

    @property
    def steps_min(self) -> int:
        return 2 * len(self.changes)

    @property
    def split(self) -> Split:
        """Split of the problem, determined by the question alone, so that splits share no question."""
        return SPLITS[int(self.id, 16) % len(SPLITS)]


def stream(split: Split, seed: int) -> Iterator[Problem]:
    """Yield different problems of a split without end, alternately with two and three changes."""
    rng = random.Random(f"problems {split} {seed}")
    seen: set[str] = set()
    for count in itertools.cycle(ORDINALS):
        while (problem := _problem(rng, count)).split != split or problem.id in seen:
            pass
        seen.add(problem.id)
        yield problem


def _problem(rng: random.Random, count: int) -> Problem:
    name, item_name, start = rng.choice(NAMES), rng.choice(THINGS), rng.randint(12, 60)
    amount, changes = start, []
    for ordinal in ORDINALS[count]:
        change = _change(rng, ordinal, name, amount)
        amount = RESULT[change.sign](amount, change.number)
        changes.append(change)
    content = f"{name} {start} {item_name} {[change.sentence for change in changes]}"
    digest = hashlib.sha256(content.encode()).hexdigest()[:12]
    return Problem(digest, f"{count} changes", name, item_name, start, tuple(changes))


def _change(rng: random.Random, ordinal: str, name: str, amount: int) -> Change:
    most = {"+": min(40, HELD_MAX - amount), "-": min(40, amount - 1), "*": min(4, HELD_MAX // amount)}
    sign = rng.choice([sign for sign, number in most.items() if number >= _LEAST])
    number = rng.randint(_LEAST, most[sign])
    sentence = f"each becomes {number}." if sign == "*" else f"{name} {rng.choice(VERBS[sign])} {number}."
    return Change(ordinal, sign, number, f"{ordinal} {sentence}")
