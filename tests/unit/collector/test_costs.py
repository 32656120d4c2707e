"""Tests of the cost of dividing a session into runs: it grows about as the session does, whatever its turns have in
common.

A session may have thousands of turns, and a client may choose them: equal requests, retries, equal answers, long
prompts, feedback that lists them. The division happens in one piece, and all other sessions wait for it.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from headrace_collector.continuations import EqualReplies
from headrace_collector.facts import Contents, TurnContent, TurnFacts
from headrace_collector.runs import RunListing, partition_runs
from headrace_schemas import Message
from tests.support.machine import count_operations

Session = tuple[Sequence[TurnFacts], Sequence[RunListing]]


def digest(*values: object) -> bytes:
    return b"\0" + hashlib.blake2b(repr(values).encode(), digest_size=7).digest()


def turn(
    number: int,
    *prefixes: bytes,
    reply: bytes | None = None,
    request: str | None = None,
    retry: int = 0,
    repeats: str | None = None,
) -> TurnFacts:
    return TurnFacts(
        turn_id=f"t{number:06}",
        model="m",
        explicit=False,
        task_id=None,
        run_id=None,
        request_digest=request or str(number),
        retry=retry,
        delivered=True,
        log_offset=number,
        time_ms=number,
        seen_ms=number,
        completions=1,
        tokens=8,
        prefixes=prefixes or (digest("prompt", number),),
        replies=(digest("reply", number) if reply is None else reply,),
        repeats=repeats,
    )


PROMPT, REPLY = digest("prompt"), digest("reply")


def equal_requests(size: int) -> Session:
    return [turn(n, PROMPT, reply=REPLY, request="x") for n in range(size)], []


def counted_retries(size: int) -> Session:
    return [turn(n, PROMPT, request="x", retry=n % 50) for n in range(size)], []


def retries_of_a_continued_answer(size: int) -> Session:
    attempts = [turn(n, PROMPT, reply=REPLY, request="x", retry=n) for n in range(size)]
    return [*attempts, turn(size, PROMPT, REPLY, digest("next"))], []


def repeats(size: int) -> Session:
    return [turn(n, PROMPT, request="x", repeats="t000000") for n in range(size)], []


def equal_answers(size: int) -> Session:
    answers = [turn(n, PROMPT, reply=REPLY) for n in range(size // 2)]
    return [*answers, *(turn(size + n, PROMPT, REPLY, digest("next", n)) for n in range(size // 2))], []


def rewritten_answers(size: int) -> Session:
    answers = [turn(n, PROMPT, reply=digest("reply", n)) for n in range(size // 2)]
    return [*answers, *(turn(size + n, PROMPT, digest("other"), digest("next", n)) for n in range(size // 2))], []


def listings(size: int) -> Session:
    return [turn(n) for n in range(size)], [RunListing(frozenset([f"t{n:06}"]), None, None, n) for n in range(size)]


def overlapping_listings(size: int) -> Session:
    pairs = [frozenset([f"t{n:06}", f"t{n + 1:06}"]) for n in range(size)]
    return [turn(n) for n in range(size)], [RunListing(pair, None, None, n) for n, pair in enumerate(pairs)]


def listings_of_named_runs(size: int) -> Session:
    pairs = [frozenset([f"t{n:06}", f"t{n + 1:06}"]) for n in range(size)]
    return [turn(n) for n in range(size)], [RunListing(pair, None, str(n), n) for n, pair in enumerate(pairs)]


SESSIONS = (
    equal_requests,
    counted_retries,
    retries_of_a_continued_answer,
    repeats,
    equal_answers,
    rewritten_answers,
    listings,
    overlapping_listings,
    listings_of_named_runs,
)


@pytest.mark.parametrize("session", SESSIONS)
def test_division_into_runs_costs_about_as_much_as_the_session_is_large(session: Callable[[int], Session]) -> None:
    small, large = (count_operations(partial(partition_runs, *session(size))) for size in (100, 800))
    assert large < 14 * small


def assistant_message(text: str, *call_ids: str) -> Message:
    calls = [{"id": call_id, "type": "function", "function": {"name": "f", "arguments": "{}"}} for call_id in call_ids]
    return Message.model_validate({"role": "assistant", "content": text, "tool_calls": calls or None})


@pytest.mark.parametrize("differing", ["nothing", "tokens", "calls", "nested tokens"])
def test_equal_answers_are_told_apart_by_their_contents_without_comparing_all(differing: str) -> None:
    """The conversations of a session may be equal for its messages and differ in what the client does not send back."""
    question = Message(role="user", content="q")

    def contents(turns: Sequence[TurnFacts]) -> Contents:
        by_turn: dict[str, TurnContent] = {}
        for number, item in enumerate(turns):
            index = number % (len(turns) // 2)
            tokens = index.to_bytes(4, "little") if differing == "tokens" else b"\1" * 4
            tokens *= index + 1 if differing == "nested tokens" else 1
            answer = assistant_message("a", f"call{index}") if differing == "calls" else assistant_message("a")
            reply = tokens + b"\2" * 8
            following = TurnContent(reply + b"\3" * 4, (b"",), (question, answer, question), (assistant_message("a"),))
            first = TurnContent(tokens, (reply,), (question,), (answer,))
            by_turn[item.turn_id] = following if len(item.prefixes) > 1 else first
        return by_turn

    def divide(size: int) -> None:
        turns, _ = equal_answers(size)
        partition = partition_runs(turns, [], contents(turns))
        assert len(partition.runs) == size // 2, "each answer is continued once"
        if differing != "nothing":
            pairs = {frozenset(turn.log_offset % size for turn in run.turns) for run in partition.runs}
            assert all(len(pair) == 1 for pair in pairs), "each by the turn that has its content"

    small, large = (count_operations(partial(divide, size)) for size in (100, 800))
    assert large < 14 * small


@pytest.mark.parametrize("seed", range(40))
def test_the_chosen_answer_is_that_of_a_comparison_with_all(seed: int) -> None:
    draw = random.Random(seed)
    replies, candidates = EqualReplies(), []
    for number in range(draw.randrange(1, 40)):
        calls = [f"c{draw.randrange(4)}" for _ in range(draw.randrange(3))]
        sequence = b"".join(draw.choice([b"\1\0\0\0", b"\2\0\0\0"]) for _ in range(draw.randrange(6)))
        content = None if draw.random() < 0.2 else TurnContent(b"", (sequence,), (), (assistant_message("a", *calls),))
        replies.add(turn(number), 0, ("label",), content)
        candidates.append((turn(number), content))
    continued: Counter[tuple[str, int]] = Counter()
    for _ in range(60):
        prompt = b"".join(draw.choice([b"\1\0\0\0", b"\2\0\0\0"]) for _ in range(draw.randrange(8)))
        echoed = [
            assistant_message(draw.choice(["", "with c1."]), f"c{draw.randrange(4)}"),
            assistant_message("see 'c3' and c2"),
        ]
        content_of_turn = (
            None if draw.random() < 0.2 else TurnContent(prompt, (), tuple(draw.sample(echoed, draw.randrange(3))), ())
        )

        def rank(
            candidate: tuple[TurnFacts, TurnContent | None], content_of_turn: TurnContent | None = content_of_turn
        ) -> tuple[int, ...]:
            item, content = candidate
            count = continued[item.turn_id, 0]
            if content_of_turn is None or content is None:
                return 0, 0, count, item.log_offset
            calls = content.call_ids(0)
            length = len(content.sequences[0]) if content_of_turn.prompt.startswith(content.sequences[0]) else 0
            return -len(content_of_turn.echoed_words(calls)), -length, count, item.log_offset

        expected = min(candidates, key=rank)[0]
        reply = replies.best(content_of_turn, continued)
        assert reply is not None
        assert reply[0].turn_id == expected.turn_id
        continued[expected.turn_id, 0] += 1


def test_long_prompts_are_not_compared_with_each_other() -> None:
    """1,600 turns with prompts of 100 messages took 15 s, in which no other session was served."""
    turns = [
        turn(n, *(digest(n, position) for position in range(100)), request="x", retry=n % 2, repeats="t000000")
        for n in range(1600)
    ]
    began_s = time.thread_time()
    partition_runs(turns, [])
    assert time.thread_time() - began_s < 3.0
