"""What traffic says by itself: the next message, failed tools, calls that are made again. Plain rules, in English.

A signal is a hint and no verdict: 1 speaks for a turn, 0 against it. Most turns show none, and then there is nothing to
say. What hints are worth here is learned from explicit feedback (`headrace.rewards.calibration`).

Packages add signals with entry points of the group `headrace.signals`, each a function like those below.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from headrace.rewards.answers import normalized
from headrace.rewards.tools import failed
from headrace_schemas import RewardResult

if TYPE_CHECKING:
    from headrace_schemas import Message, Trajectory

GROUP = "headrace.signals"
_REPEATS_FROM = 0.85
_COMPARED_MAX = 4000
_WORDS_COMPARED_MAX = 500
"""Comparing takes time in the product of the words, and a run has hundreds of turns."""
_CORRECTS = re.compile(
    r"^\W*(?:no\b(?! (?:problem|worries|need|thanks))|nope|wrong|incorrect|not (?:quite|what|that|right))"
    r"|\b(?:that(?:'s| is| was) (?:not|wrong|incorrect)|i (?:said|meant|asked)"
    r"|you (?:forgot|missed|misunderstood|got .{0,20}wrong)"
    r"|should(?: have)? be(?:en)?\b.{0,40}\b(?:not|instead)|(?:doesn't|does not|didn't|did not) (?:work|help|answer))",
    re.IGNORECASE,
)
_THANKS = re.compile(
    r"\b(?:thank(?:s| you)|thx|perfect|exactly what i|that (?:works|worked|helps|helped)|works now|well done)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Hint:
    """One hint. `turn_id` None: about the run."""

    signal: str
    value: float
    turn_id: str | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """One answer of the model with what came before and after it."""

    turn_id: str
    asked: str
    """The user's last message before it; empty when there was none."""
    answer: Message
    followed: tuple[Message, ...]
    """What came between it and the next answer."""

    @property
    def reply(self) -> str | None:
        """The next message of the user; None when there was none."""
        return next((one.text for one in self.followed if one.role == "user"), None)


Signal = Callable[[Sequence[Exchange], Mapping[str, Any]], Iterable[Hint]]
"""Reads the exchanges of a run and its context."""


def exchanges(trajectory: Trajectory) -> list[Exchange]:
    """Those of the first branch. Its spans are the last answers of its dialogue: earlier ones the client brought."""
    if not trajectory.branches or not trajectory.dialogues:
        return []
    messages, turns = trajectory.dialogues[0].messages, [span.turn_id for span in trajectory.branches[0].spans]
    places = [at for at, one in enumerate(messages) if one.role == "assistant"][-len(turns) :]
    found = []
    for number, (turn_id, at) in enumerate(zip(turns[-len(places) :], places, strict=True)):
        until = places[number + 1] if number + 1 < len(places) else len(messages)
        asked = next((one.text for one in reversed(messages[:at]) if one.role == "user"), "")
        found.append(Exchange(turn_id, asked, messages[at], messages[at + 1 : until]))
    return found


def corrected(run: Sequence[Exchange], _context: Mapping[str, Any]) -> Iterator[Hint]:
    """The user contradicts the answer."""
    for one in run:
        if one.reply is not None and _CORRECTS.search(one.reply):
            yield Hint("corrected", 0.0, one.turn_id)


def thanked(run: Sequence[Exchange], _context: Mapping[str, Any]) -> Iterator[Hint]:
    """The user thanks for the answer, and does not correct it in the same breath."""
    for one in run:
        if one.reply is not None and _THANKS.search(one.reply) and not _CORRECTS.search(one.reply):
            yield Hint("thanked", 1.0, one.turn_id)


def repeated(run: Sequence[Exchange], _context: Mapping[str, Any]) -> Iterator[Hint]:
    """The user asks the same again: the answer was none."""
    for one in run:
        if one.reply is not None and one.asked and _alike(one.asked, one.reply) >= _REPEATS_FROM:
            yield Hint("repeated", 0.0, one.turn_id)


def tool_failed(run: Sequence[Exchange], _context: Mapping[str, Any]) -> Iterator[Hint]:
    """A tool answered the turn's call with an error."""
    for one in run:
        answers = [message.text for message in one.followed if message.role == "tool"]
        if answers:
            yield Hint("tool_failed", 0.0 if any(map(failed, answers)) else 1.0, one.turn_id)


def looped(run: Sequence[Exchange], _context: Mapping[str, Any]) -> Iterator[Hint]:
    """The agent makes a call again that it has made, with the same arguments."""
    made: set[tuple[str, str]] = set()
    for one in run:
        calls = {(call.function.name, _canonical(call.function.arguments)) for call in one.answer.tool_calls or ()}
        if calls & made:
            yield Hint("looped", 0.0, one.turn_id)
        made |= calls


def left(run: Sequence[Exchange], _context: Mapping[str, Any]) -> Iterator[Hint]:
    """The run ended before the model had answered: behind a call, or with a message that nobody answered."""
    if run and (run[-1].followed or (run[-1].answer.tool_calls and not run[-1].answer.text)):
        yield Hint("left", 0.0)


def used(run: Sequence[Exchange], context: Mapping[str, Any]) -> Iterator[Hint]:
    """How much of the last answer is in what was really used: the text `used` of the context, e.g. the mail as sent."""
    text = context.get("used")
    if run and isinstance(text, str):
        yield Hint("used", _alike(run[-1].answer.text, text))


@cache
def _signals() -> tuple[Signal, ...]:
    return tuple(point.load() for point in sorted(entry_points(group=GROUP), key=lambda point: point.name))


def hints(trajectory: Trajectory, context: Mapping[str, Any]) -> list[Hint]:
    """What all installed signals say of a run."""
    run = exchanges(trajectory)
    return [hint for signal in _signals() for hint in signal(run, context)]


def signals(trajectory: Trajectory, context: Mapping[str, Any]) -> RewardResult:
    """The mean over the signals of a run, each with the mean of its hints, and the mean of the hints on each turn;
    abstains where there is none. A reward function.

    Signals count alike: however many calls worked, what the user says of the answer weighs as much.
    """
    found = hints(trajectory, context)
    by_signal: dict[str, list[float]] = {}
    by_turn: dict[str, list[float]] = {}
    for one in found:
        by_signal.setdefault(one.signal, []).append(one.value)
        if one.turn_id is not None:
            by_turn.setdefault(one.turn_id, []).append(one.value)
    turns = {turn_id: sum(values) / len(values) for turn_id, values in by_turn.items()}
    if not found:
        return RewardResult()
    criteria = {name: sum(values) / len(values) for name, values in by_signal.items()}
    return RewardResult(value=sum(criteria.values()) / len(criteria), criteria=criteria, turns=turns)


def _alike(one: str, other: str) -> float:
    """From 0 to 1, by words; of long texts the beginnings."""
    some, others = (normalized(text[:_COMPARED_MAX]).split()[:_WORDS_COMPARED_MAX] for text in (one, other))
    return SequenceMatcher(None, some, others, autojunk=False).ratio() if some and others else 0.0


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()
