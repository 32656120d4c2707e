"""Signals of quality that traffic itself contains: the user's next message, failed tools, repeated calls. The rules are
for English.

A signal yields hints, not final scores: the value 1 supports a turn, and 0 contradicts it. Most turns have no hint. How
much a hint is worth can be calibrated with explicit feedback (`headrace.rewards.combining`).

Packages add signals as entry points of the group `headrace.signals`, each a function like those below.
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

from headrace.rewards.answers import failed, normalized
from headrace_schemas import RewardResult

if TYPE_CHECKING:
    from headrace_schemas import Message, Trajectory

GROUP = "headrace.signals"
_REPEATS_FROM = 0.85
_COMPARED_MAX = 4000
_WORDS_COMPARED_MAX = 500
"""Maximum number of words that are compared. The time of a comparison is proportional to the product of the lengths,
and a run may have hundreds of turns."""
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
    """Hint that one signal gives. `turn_id` is None if the hint is about the whole run."""

    signal: str
    value: float
    turn_id: str | None = None


@dataclass(frozen=True, slots=True)
class Exchange:
    """One answer of the model with the messages before and after it."""

    turn_id: str
    question: str
    """Last user message before the answer, or an empty string."""
    answer: Message
    following: tuple[Message, ...]
    """Messages between this answer and the next answer."""

    @property
    def asked(self) -> str:
        """Earlier name of `question`, for installed signals."""
        return self.question

    @property
    def followed(self) -> tuple[Message, ...]:
        """Earlier name of `following`, for installed signals."""
        return self.following

    @property
    def reply(self) -> str | None:
        """The next message of the user, or None."""
        return next((message.text for message in self.following if message.role == "user"), None)


Signal = Callable[[Sequence[Exchange], Mapping[str, Any]], Iterable[Hint]]
"""Function that reads the exchanges of a run and its context, and yields hints."""


def exchanges(trajectory: Trajectory) -> list[Exchange]:
    """Return the exchanges of a trajectory: each captured answer of the model, with the messages before and after it.

    Only the last answers of the dialogue were captured: as many as the first token sequence of the trajectory
    (`branches[0]`) has sampled spans. Earlier answers were part of the client's first prompt, and are left out.
    """
    if not trajectory.branches or not trajectory.dialogues:
        return []
    messages, turns = trajectory.dialogues[0].messages, [span.turn_id for span in trajectory.branches[0].spans]
    indices = [index for index, message in enumerate(messages) if message.role == "assistant"][-len(turns) :]
    result = []
    for number, (turn_id, index) in enumerate(zip(turns[-len(indices) :], indices, strict=True)):
        end = indices[number + 1] if number + 1 < len(indices) else len(messages)
        question = next((message.text for message in reversed(messages[:index]) if message.role == "user"), "")
        result.append(Exchange(turn_id, question, messages[index], messages[index + 1 : end]))
    return result


def corrected(run: Sequence[Exchange], _context: Mapping[str, Any]) -> Iterator[Hint]:
    """Yield a hint with value 0 for each answer to which the user replied with a correction, such as "no, I meant"."""
    for exchange in run:
        if exchange.reply is not None and _CORRECTS.search(exchange.reply):
            yield Hint("corrected", 0.0, exchange.turn_id)


def thanked(run: Sequence[Exchange], _context: Mapping[str, Any]) -> Iterator[Hint]:
    """Yield a hint with value 1 for each answer for which the user gave thanks without correcting it."""
    for exchange in run:
        if exchange.reply is not None and _THANKS.search(exchange.reply) and not _CORRECTS.search(exchange.reply):
            yield Hint("thanked", 1.0, exchange.turn_id)


def repeated(run: Sequence[Exchange], _context: Mapping[str, Any]) -> Iterator[Hint]:
    """Yield a hint with value 0 for each answer after which the user repeated the question."""
    for exchange in run:
        if (
            exchange.reply is not None
            and exchange.question
            and _similarity(exchange.question, exchange.reply) >= _REPEATS_FROM
        ):
            yield Hint("repeated", 0.0, exchange.turn_id)


def tool_failed(run: Sequence[Exchange], _context: Mapping[str, Any]) -> Iterator[Hint]:
    """Yield a hint for each turn whose tool calls have results: 0 if a result is an error, else 1."""
    for exchange in run:
        answers = [message.text for message in exchange.following if message.role == "tool"]
        if answers:
            yield Hint("tool_failed", 0.0 if any(map(failed, answers)) else 1.0, exchange.turn_id)


def looped(run: Sequence[Exchange], _context: Mapping[str, Any]) -> Iterator[Hint]:
    """Yield a hint with value 0 for each turn with a tool call that the run has already made with the same
    arguments."""
    earlier_calls: set[tuple[str, str]] = set()
    for exchange in run:
        calls = {(call.function.name, _canonical(call.function.arguments)) for call in exchange.answer.tool_calls or ()}
        if calls & earlier_calls:
            yield Hint("looped", 0.0, exchange.turn_id)
        earlier_calls |= calls


def left(run: Sequence[Exchange], _context: Mapping[str, Any]) -> Iterator[Hint]:
    """Yield a hint with value 0 for a run that ended without an answer of the model: after a tool call, or after a
    message of the user."""
    if run and (run[-1].following or (run[-1].answer.tool_calls and not run[-1].answer.text)):
        yield Hint("left", 0.0)


def used(run: Sequence[Exchange], context: Mapping[str, Any]) -> Iterator[Hint]:
    """Yield, as the value of a hint, the similarity of the last answer to `context["used"]`, the text that was really
    used, for example the mail that was sent."""
    text = context.get("used")
    if run and isinstance(text, str):
        yield Hint("used", _similarity(run[-1].answer.text, text))


@cache
def _signals() -> tuple[Signal, ...]:
    return tuple(point.load() for point in sorted(entry_points(group=GROUP), key=lambda point: point.name))


def hints(trajectory: Trajectory, context: Mapping[str, Any]) -> list[Hint]:
    """Return the hints that all installed signals give about a run."""
    run = exchanges(trajectory)
    return [hint for signal in _signals() for hint in signal(run, context)]


def signals(trajectory: Trajectory, context: Mapping[str, Any]) -> RewardResult:
    """Return the mean value of the signals of a run, where the value of a signal is the mean of its hints. It is meant
    as a reward function.

    The result also contains the mean of the hints about each turn. It abstains if there are no hints. Signals have
    equal weight, so that many successful calls do not outweigh the user's message.
    """
    all_hints = hints(trajectory, context)
    by_signal: dict[str, list[float]] = {}
    by_turn: dict[str, list[float]] = {}
    for hint in all_hints:
        by_signal.setdefault(hint.signal, []).append(hint.value)
        if hint.turn_id is not None:
            by_turn.setdefault(hint.turn_id, []).append(hint.value)
    turns = {turn_id: sum(values) / len(values) for turn_id, values in by_turn.items()}
    if not all_hints:
        return RewardResult()
    criteria = {name: sum(values) / len(values) for name, values in by_signal.items()}
    return RewardResult(value=sum(criteria.values()) / len(criteria), criteria=criteria, turns=turns)


def _similarity(first: str, second: str) -> float:
    """Return the similarity of two texts from 0 to 1, compared word by word. Only the beginnings of long texts are
    compared."""
    first_words, second_words = (
        normalized(text[:_COMPARED_MAX]).split()[:_WORDS_COMPARED_MAX] for text in (first, second)
    )
    return (
        SequenceMatcher(None, first_words, second_words, autojunk=False).ratio()
        if first_words and second_words
        else 0.0
    )


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()
