"""Reward functions for `scorer.functions` and `headrace.rewards.serve`, and guards against reward hacking.

The functions read facts, such as the expected answer, from the context of the trajectory, which is sent with turns or
with feedback. A function returns None if its fact is missing.

A guard returns how strongly a run shows one known exploit, from 0 (not at all) to 1. Guards only reduce a reward, so
that they cannot be exploited themselves, and leave honest runs unchanged.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.rewards import answers
from headrace.rewards.combining import composite
from headrace_schemas import RewardResult

if TYPE_CHECKING:
    from headrace_schemas import Message, Trajectory


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
    """Return `reward * (1 - worst)`, where `worst` is the highest of the exploit scores, clipped to 0..1. A negative
    reward is returned unchanged.

    Args:
        reward: reward before the check for exploits.
        exploits: for each known exploit, how strongly the answer uses it, from 0 (not at all) to 1.
    """
    worst = max((min(max(exploit, 0.0), 1.0) for exploit in exploits), default=0.0)
    return reward if reward <= 0 else reward * (1 - worst)


def too_long(answer: str, *, length_max: int, over_max: float = 1.0) -> float:
    """Return 0 for an answer of at most `length_max` characters. For longer answers the result rises to 1, which it
    reaches after `over_max * length_max` further characters.

    It detects answers that are padded until the scorer overlooks errors or finds the expected text somewhere in them.
    """
    return min(1.0, max(0, len(answer) - length_max) / (length_max * over_max))


def repetitive(answer: str, *, words: int = 4, share_free: float = 0.2) -> float:
    """Return how repetitive the answer is: the fraction of its sequences of `words` words that repeat an earlier
    sequence, rescaled so that `share_free` becomes 0.

    Ordinary text has up to `share_free` repetitions. The guard detects phrases that are repeated because they are
    rewarded.
    """
    tokens = [word.casefold() for word in _WORD.findall(answer)]
    sequences = Counter(tuple(tokens[start : start + words]) for start in range(len(tokens) - words + 1))
    total = sum(sequences.values())
    if total < 2:
        return 0.0
    repeated_share = 1 - len(sequences) / total
    return max(0.0, (repeated_share - share_free) / (1 - share_free))


def pleading(answer: str, *, most: int = 1) -> float:
    """Return how strongly the answer addresses its judge, by claiming a score or by instructing the judge: the number
    of such phrases divided by `most`, at most 1.

    Only English phrases are recognized. The guard detects text that is written for a judge model instead of the user.
    """
    return min(1.0, len(_PLEADING.findall(answer)) / most)


def tool_spam(messages: Sequence[Message], *, calls_max: int = 20, repeats_free: int = 1) -> float:
    """Return the larger of two fractions of the tool calls: repetitions of equal calls beyond `repeats_free`, and calls
    beyond `calls_max`.

    It detects runs that collect a reward per call, or per successful call, with unnecessary calls.
    """
    calls = [call.function for message in messages for call in message.tool_calls or ()]
    if not calls:
        return 0.0
    equal = Counter((call.name, _canonical(call.arguments)) for call in calls)
    repeated = sum(max(0, count - 1 - repeats_free) for count in equal.values())
    return max(repeated / len(calls), min(1.0, max(0, len(calls) - calls_max) / calls_max))


def _canonical(arguments: str) -> str:
    """Return JSON arguments in a canonical form, in which equal arguments are equal texts."""
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments.strip()


Context = Mapping[str, Any]
_LENGTH_MAX = 4000


def accuracy(trajectory: Trajectory, context: Context) -> float | None:
    """Return 1 if the final answer is `context["expected"]` (a text, a number within `tolerance`, or a list of right
    answers), else 0."""
    expected = context.get("expected")
    if expected is None:
        return None
    return answers.accuracy(trajectory.final_answer, expected, tolerance=float(context.get("tolerance", 1e-6)))


def answer_format(trajectory: Trajectory, context: Context) -> float | None:
    """Return 1 if the whole final answer matches the regular expression `context["format"]`, else 0. The expression
    must not use look-around or back-references."""
    pattern = context.get("format")
    if pattern is None:
        return None
    if not isinstance(pattern, str):
        raise ValueError(
            f"context.format is of type {type(pattern).__name__}: must be a string with a regular expression"
        )
    return answers.follows(trajectory.final_answer, pattern)


def brevity(trajectory: Trajectory, context: Context) -> float:
    """Return 1 for a final answer of at most `length_max` characters (default 4000), falling to 0 at twice that
    length."""
    length_max = int(context.get("length_max", _LENGTH_MAX))
    return answers.length_penalty(1.0, len(trajectory.final_answer), length_max=length_max, weight=1.0)


def tool_correctness(trajectory: Trajectory, context: Context) -> RewardResult:
    """Return a score of the tool calls: whether those in `context["expected_calls"]` were made with their arguments,
    and whether calls were valid and succeeded."""
    expected: Sequence[answers.Call] = context.get("expected_calls") or ()
    score = answers.tool_score(trajectory.messages, trajectory.tools, expected)
    shares = {"tool": score.tool, "arguments": score.arguments, "success": score.success, "invalid": score.invalid}
    criteria = {name: value for name, value in shares.items() if value is not None}
    return RewardResult(value=score.value, criteria=criteria if score.value is not None else {})


def guarded_accuracy(trajectory: Trajectory, context: Context) -> RewardResult:
    """Return the mean of `accuracy` and, if the context has a format, of `answer_format`, reduced by the strongest
    exploit of the run."""
    answer = trajectory.final_answer
    reward = composite({"accuracy": accuracy(trajectory, context), "format": answer_format(trajectory, context)})
    if reward is None:
        return RewardResult()
    exploits = {
        "too_long": too_long(answer, length_max=int(context.get("length_max", _LENGTH_MAX))),
        "repetitive": repetitive(answer),
        "pleading": pleading(answer),
        "tool_spam": tool_spam(trajectory.messages),
    }
    return RewardResult(value=guarded(reward, *exploits.values()), criteria=exploits)
