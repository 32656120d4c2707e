"""Tests of conversation histories that clients rewrite.

Each sampled token is in exactly one span, and runs and forks are divided correctly. A retried request is credited once;
all parallel samples of the same prompt count (pitfalls 20 and 21). Equal answers are told apart by their contents.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest

from headrace_collector.branches import build_branches
from headrace_collector.continuations import EqualReplies
from headrace_collector.facts import Contents, TurnContent, TurnFacts, turn_facts
from headrace_collector.retries import superseded_turns
from headrace_collector.runs import SessionRun, partition_runs
from headrace_gateway.access.keys import ALL_SCOPES, Caller
from headrace_gateway.requests.identity import RequestMetadata, identify
from headrace_gateway.settings import LimitSettings
from headrace_schemas import Message, Turn
from headrace_schemas.rules.turn_history import token_bytes
from tests.support.machine import count_operations
from tests.support.presence import draw_seed
from tests.support.tokenizer_families import TEMPLATES, render
from tests.support.turns import START, after, ask, user
from tests.unit.collector.test_branches import equal_answers, facts_of_turn

HISTORIES = 125
"""Histories for each of the eight families."""
STOP = "</code>"
ECHOES = ("exact", "exact", "exact", "json", "stop string", "stripped", "without reasoning", "call as text")
"""Forms in which a client sends an answer back and that still show which answer it is."""
REWRITES = ("edited", "truncated")
"""Changes after which no answer of the conversation is there any more."""
CALLER = Caller("0" * 64, "key", "default", ALL_SCOPES, None, LimitSettings())
Json = dict[str, Any]


@dataclass
class Conversation:
    """One conversation of a client, and the turns that were captured from it."""

    family: str
    number: int
    draw: random.Random
    opening: str
    equal_answers: bool
    messages: list[Json] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    is_rewritten: bool = False

    def step(self, at: float) -> None:
        """Send the next request, capture the answer, and add it to the history exactly or rewritten."""
        if not self.messages:
            self.messages = [
                {"role": "system", "content": "You repair code."},
                {"role": "user", "content": self.opening},
            ]
        if self.draw.random() < 0.3:  # a clock in the system prompt
            self.messages[0] = {"role": "system", "content": f"It is {at} o'clock."}
        text, raw = self._answer()
        prompt = render(self.family, self.messages)
        answer = Message.model_validate({"role": "assistant", **text})
        request = tuple(Message.model_validate(message) for message in self.messages)
        session = identify(CALLER, {}, RequestMetadata({}, {}), "m", request).session_id
        turn = ask(request, at=at, session=session, session_source="implicit", prompt_token_ids=tuple(map(ord, prompt)))
        tokens = tuple(map(ord, raw))
        choice = turn.choices[0].model_copy(
            update={"token_ids": tokens, "logprobs": (-0.5,) * len(tokens), "message": answer}
        )
        usage = turn.usage.model_copy(update={"completion_tokens": len(tokens)})
        self.turns.append(turn.model_copy(update={"choices": (choice,), "usage": usage}))
        self._echo(text)

    def _answer(self) -> tuple[Json, str]:
        """Return an answer as the gateway captures it, and the text that the model sampled."""
        step = len(self.turns)
        mark = step if self.equal_answers else f"{self.number}.{step}"
        text: Json = {"content": f"Answer {mark}: I look."}
        if self.draw.random() < 0.3:
            text["reasoning_content"] = f"Thought {mark}."
        if self.draw.random() < 0.6 or (self.equal_answers and step == 0):  # equal texts have no other mark
            calls = range(self.draw.randint(1, 2))
            text["tool_calls"] = [
                {
                    "id": f"call_{self.number}_{step}_{call}",
                    "type": "function",
                    "function": {"name": "read", "arguments": '{"path":  "a.py", "line": 1}'},
                }
                for call in calls
            ]
        rendered = render(self.family, [*self.messages, {"role": "assistant", **text}], add_generation_prompt=False)
        prompt = render(self.family, self.messages)
        raw = rendered[len(prompt) :] if rendered.startswith(prompt) else f"{text['content']}<|end|>"
        return text, raw

    def _echo(self, text: Json) -> None:
        form = self.draw.choice(ECHOES)
        echo: Json = {"role": "assistant", **json.loads(json.dumps(text))}
        calls = echo.get("tool_calls", [])
        if form == "json":
            for call in calls:
                call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
        elif form == "stop string":
            echo["content"] += STOP
        elif form == "stripped":
            echo["content"] = f" {echo['content']}\n"
        elif form == "without reasoning":
            echo.pop("reasoning_content", None)
        elif form == "call as text" and calls:
            echo["content"] = f"Calling tools:\n{calls}"
            del echo["tool_calls"]
        self.messages.append(echo)
        if calls and "tool_calls" in echo:
            results = [{"role": "tool", "tool_call_id": call["id"], "content": "a line"} for call in calls]
            self.messages += self.draw.sample(results, len(results))
        else:
            self.messages.append({"role": "user", "content": f"Go on, {self.number}."})
        if self.draw.random() < 0.06:
            self.is_rewritten = True
            self._rewrite(self.draw.choice(REWRITES))

    def _rewrite(self, kind: str) -> None:
        answers = [message for message in self.messages if message["role"] == "assistant"]
        if kind == "edited":
            answers[-1]["content"] = "Something else."
            answers[-1].pop("tool_calls", None)
        else:
            del self.messages[1:3]


def history(family: str, draw: random.Random) -> list[Conversation]:
    """Return the interleaved turns of two conversations with equal first messages."""
    equal = draw.random() < 0.5
    conversations = [Conversation(family, number, draw, "fix it", equal) for number in range(2)]
    for at in range(draw.randint(4, 12)):
        draw.choice(conversations).step(at)
    return conversations


def divided(turns: Sequence[Turn]) -> Iterator[list[Turn]]:
    """Yield the turns of each run, session by session, as the collector divides them."""
    sessions: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        sessions[turn.session_key].append(turn)
    for members in sessions.values():
        by_id = {turn.turn_id: turn for turn in members}
        for run in _runs(members):
            yield [by_id[turn.turn_id] for turn in run.turns]


def _runs(turns: Sequence[Turn]) -> Sequence[SessionRun]:
    facts = [turn_facts(turn, START, offset) for offset, turn in enumerate(turns)]
    first = partition_runs(facts, [])
    contents = {turn.turn_id: TurnContent.of(turn) for turn in turns if turn.turn_id in first.ties}
    return partition_runs(facts, [], contents).runs if first.ties else first.runs


def leaves(turns: Sequence[Turn]) -> int:
    """Return the number of turns that no later turn of the run continues exactly. Each is the end of one branch."""
    prompts = [token_bytes(turn.prompt_token_ids) for turn in turns]
    sequences = [prompt + token_bytes(turn.choices[0].token_ids) for prompt, turn in zip(prompts, turns, strict=True)]
    parents = set()
    for prompt in prompts:
        fitting = [at for at, sequence in enumerate(sequences) if prompt.startswith(sequence)]
        if fitting:
            longest = max(len(sequences[at]) for at in fitting)
            equal = [at for at in fitting if len(sequences[at]) == longest]
            unused = [at for at in equal if at not in parents]
            parents.add((unused or equal)[0])
    return len(turns) - len(parents)


@pytest.mark.parametrize("family", TEMPLATES)
def test_each_sampled_token_is_in_one_place_and_runs_are_conversations(family: str) -> None:
    draw = random.Random(draw_seed(f"histories {family}"))
    rewritten = 0
    for _ in range(HISTORIES):
        conversations = history(family, draw)
        turns = sorted((turn for c in conversations for turn in c.turns), key=lambda turn: turn.started_at)
        conversation_of = {turn.turn_id: c.number for c in conversations for turn in c.turns}
        runs = list(divided(turns))
        positions = []
        for run in runs:
            branches, _ = build_branches(run)
            for branch in branches:
                for span in branch.spans:
                    sampled = branch.token_ids[span.start : span.stop]
                    positions.append(span.turn_id)
                    assert sampled == next(t for t in run if t.turn_id == span.turn_id).choices[0].token_ids
            assert len(branches) == leaves(run)
        assert sorted(positions) == sorted(conversation_of), "each turn is in exactly one span"
        if any(c.is_rewritten for c in conversations):
            rewritten += 1
            continue
        expected = sorted(sorted(turn.turn_id for turn in c.turns) for c in conversations if c.turns)
        assert sorted(sorted(turn.turn_id for turn in run) for run in runs) == expected
    assert 0 < rewritten < HISTORIES / 2


@pytest.mark.parametrize("has_calls", [True, False], ids=["calls", "texts"])
def test_interleaved_conversations_with_equal_openings_and_answers_stay_apart(has_calls: bool) -> None:
    draw = random.Random(draw_seed("interleaved"))
    histories: list[list[Message]] = [[Message(role="user", content="fix it")] for _ in range(64)]
    captured: list[list[Turn]] = [[] for _ in range(64)]
    turns: list[Turn] = []
    for step in range(4):
        for number in draw.sample(range(64), 64):
            call = {"id": f"call_{number}_{step}", "function": {"name": "read", "arguments": "{}"}}
            answer = Message.model_validate(
                {"role": "assistant", "content": "I look.", "tool_calls": [call] if has_calls else None}
            )
            turn = ask(histories[number], "I look.", at=len(turns), session_source="implicit")
            turn = turn.model_copy(update={"choices": (turn.choices[0].model_copy(update={"message": answer}),)})
            turns.append(turn)
            captured[number].append(turn)
            reply = (
                Message(role="tool", content="a line", tool_call_id=f"call_{number}_{step}")
                if has_calls
                else Message(role="user", content=f"more {number}")
            )
            histories[number] += [answer, reply]
    runs = [[turn.turn_id for turn in run] for run in divided(turns)]
    if has_calls:
        assert sorted(runs) == sorted([turn.turn_id for turn in conversation_turns] for conversation_turns in captured)
    else:  # the first answers are equal in every way, so any of them is the right one
        assert sorted(run[1:] for run in runs) == sorted(
            [turn.turn_id for turn in conversation_turns[1:]] for conversation_turns in captured
        )


def call(reply: str = "x", **fields: Any) -> Turn:
    return ask([user("q")], reply, **fields)


def superseded_ids(*turns: Turn) -> dict[str, str]:
    """Return the ids of superseded turns among `turns`, captured in the order of their times."""
    return superseded_turns([turn_facts(turn, START, round(turn.time.timestamp() * 1000)) for turn in turns])


def test_pitfall_21_parallel_samples_are_not_superseded() -> None:
    assert superseded_ids(call(at=0), call(at=0), call(at=1)) == {}


def test_pitfall_20_retry_supersedes_a_timed_out_turn() -> None:
    first, retry = call(at=0, delivered=False), call(at=5, retry=1)
    assert superseded_ids(retry, first) == {first.turn_id: retry.turn_id}


def test_retry_supersedes_an_answer_lost_on_its_way() -> None:
    first, retry = call(at=0), call(at=5, retry=1)
    assert superseded_ids(first, retry) == {first.turn_id: retry.turn_id}


def test_repeated_retries_leave_the_last_turn() -> None:
    first, second, third = call(at=0), call(at=5, retry=1), call(at=9, retry=2)
    assert superseded_ids(third, first, second) == {first.turn_id: second.turn_id, second.turn_id: third.turn_id}


def test_retry_supersedes_one_of_several_parallel_samples() -> None:
    a, lost, b = call("a", at=0), call("b", at=1, delivered=False), call("c", at=2)
    retry = call("d", at=5, retry=1)
    assert superseded_ids(a, lost, b, retry) == {lost.turn_id: retry.turn_id}


def test_continued_answer_is_not_superseded() -> None:
    used = call("a", at=0)
    retry = call("b", at=5, retry=1)
    goes_on = ask(after(used, user("more")), at=6)
    assert superseded_ids(used, retry, goes_on) == {}, "what the retry repeats failed before it gave an answer"


def test_equal_answer_to_the_retry_supersedes_the_first() -> None:
    first, retry = call("same", at=0), call("same", at=5, retry=1)
    goes_on = ask(after(retry, user("more")), at=6)
    assert superseded_ids(first, retry, goes_on) == {first.turn_id: retry.turn_id}


def test_different_request_is_not_a_retry() -> None:
    other = ask([user("other")], at=0, delivered=False)
    assert superseded_ids(other, call(at=5, retry=1)) == {}


def test_uncounted_retry_supersedes_an_undelivered_turn() -> None:
    first = call("a", at=0, delivered=False)
    retry = call("b", at=5, repeats=first.turn_id)
    assert superseded_ids(retry, first) == {first.turn_id: retry.turn_id}


def test_uncounted_retry_supersedes_a_delivered_answer_only_once_the_client_uses_its_own() -> None:
    first = call("a", at=0)
    retry = call("b", at=5, repeats=first.turn_id)
    goes_on = ask(after(retry, user("more")), at=6)
    used = ask(after(first, user("more")), at=6)
    assert superseded_ids(first, retry) == {}, "two samples, one after the other"
    assert superseded_ids(first, retry, goes_on) == {first.turn_id: retry.turn_id}
    assert superseded_ids(first, retry, used) == superseded_ids(first, retry, used, goes_on) == {}


def test_repeated_request_of_an_unnamed_session_is_another_user() -> None:
    first = call("a", at=0, session_source="implicit")
    retry = call("b", at=5, session_source="implicit", repeats=first.turn_id)
    goes_on = ask(after(retry, user("more")), at=6, session_source="implicit")
    assert superseded_ids(first, retry, goes_on) == {}


def test_repeated_turn_of_another_request_or_session_is_not_superseded() -> None:
    first = ask([user("p")], "a", at=0, delivered=False)
    assert superseded_ids(first, call("b", at=5, repeats=first.turn_id), call("c", repeats="unknown")) == {}


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
        replies.add(facts_of_turn(number), 0, ("label",), content)
        candidates.append((facts_of_turn(number), content))
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
