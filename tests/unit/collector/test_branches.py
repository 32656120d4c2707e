"""Tests of the branch graph, and of the cost of dividing a session into runs.

Token prefixes match exactly, and each sampled token is in one span of one branch (P2). A session may have thousands of
turns, and a client may choose them: equal requests, retries, equal answers, long prompts, feedback that lists them. The
division happens in one piece, and all other sessions wait for it, so its cost must grow about as the session does.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_collector.branches import build_branches
from headrace_collector.facts import TurnContent, TurnFacts
from headrace_collector.prompts import Prompts
from headrace_collector.runs import RunListing, partition_runs
from headrace_schemas import Branch, Choice, Grammar, Message, Sampling, TokenGrammar, Turn
from headrace_schemas.rules.turn_history import TurnHistory
from tests.support.machine import count_operations
from tests.support.turns import EOS, after, ask, extending, render, said, text_ids, tool, user

GREEDY = Sampling(temperature=0.0)
HELD = Sampling(grammar=Grammar(tool_choice="required"))
REPORTED: dict[str, Any] = {
    "sampling": HELD,
    "token_grammar": TokenGrammar(
        text="start: /.*/", library="llguidance", library_version="1", tokenizer_sha256="0" * 64, vocabulary=9,
        end_id=EOS, stop_ids=(EOS,),
    ),
}  # fmt: skip
UNREPORTED: dict[str, Any] = {"sampling": HELD}


def spans(branch: Branch) -> list[tuple[str, int]]:
    return [(span.turn_id, span.choice) for span in branch.spans]


def test_branch_of_a_conversation_has_loss_on_sampled_tokens() -> None:
    first = ask([user("q")], "call")
    second = ask(after(first, tool("result")), "answer")
    (branch,), (dialogue,) = build_branches([second, first])
    assert branch.token_ids == render(second.messages) + second.choices[0].token_ids
    sampled = [token for token, mask in zip(branch.token_ids, branch.loss_mask, strict=True) if mask]
    assert sampled == [*text_ids("call"), EOS, *text_ids("answer"), EOS]
    assert [message.text for message in dialogue.messages] == ["q", "call", "result", "answer"]


def test_spans_have_the_sets_that_their_tokens_were_sampled_from() -> None:
    first = ask([user("q")], "a", **REPORTED)
    second = ask(after(first, user("m")), "b", **REPORTED)
    third = ask(after(second, user("m")), "c", sampling=HELD.model_copy(update={"top_k": 1}))
    stored = tuple(number for token in third.choices[0].token_ids for number in (1, token))
    third = third.model_copy(update={"choices": (third.choices[0].model_copy(update={"stored_sets": stored}),)})
    last = ask(after(third, user("m")), "d")
    (branch,), _ = build_branches([first, second, third, last])
    assert branch.grammars == (REPORTED["token_grammar"],), "each grammar once"
    assert [span.grammar for span in branch.spans] == [0, 0, None, None]
    assert [span.stored_sets for span in branch.spans] == [None, None, stored, None]
    assert [span.restricted for span in branch.spans] == [True, True, True, False]


def test_branches_fork_without_an_exact_prefix() -> None:
    first = ask([user("q")], "thinking: yes")
    stripped = ask([user("q"), said("yes"), user("more")], "answer")
    graph, _ = build_branches([first, stripped])
    assert [spans(branch) for branch in graph] == [[(first.turn_id, 0)], [(stripped.turn_id, 0)]]


def test_branches_fork_at_one_different_token() -> None:
    first = ask([user("q")], "yes")
    changed = (*render(first.messages)[:-1], 4, *text_ids("yes"), EOS, 2, *text_ids("more"), EOS, 3)
    second = ask(after(first, user("more")), "answer", prompt_token_ids=changed)
    assert len(build_branches([first, second])[0]) == 2


def test_branch_continues_a_truncated_answer_with_equal_tokens() -> None:
    first = ask([user("q")], "one two", stop=False)
    second = ask([user("q")], "three", prompt_token_ids=render([user("q")]) + first.choices[0].token_ids)
    (branch,), _ = build_branches([first, second])
    assert spans(branch) == [(first.turn_id, 0), (second.turn_id, 0)]
    assert branch.spans[0].stop == branch.spans[1].start, "no observation between them"


def test_fork_has_the_shared_prefix_as_context() -> None:
    first = ask([user("q")], "call")
    left = ask(after(first, tool("a")), "left", at=2)
    right = ask(after(first, tool("bbbb")), "right", at=3)
    main, fork = build_branches([first, left, right])[0]
    assert spans(main) == [(first.turn_id, 0), (right.turn_id, 0)], "the longest line goes on"
    assert spans(fork) == [(left.turn_id, 0)]
    assert sum(fork.loss_mask) == len(left.choices[0].token_ids)


def test_branches_continue_any_choice() -> None:
    first = ask([user("q")], "a", "b", "c")
    second = ask(after(first, user("more"), choice=1), "answer")
    graph, dialogues = build_branches([first, second])
    assert sorted(map(spans, graph)) == [
        [(first.turn_id, 0)],
        [(first.turn_id, 1), (second.turn_id, 0)],
        [(first.turn_id, 2)],
    ]
    assert len(dialogues) == 3


def test_branches_keep_equal_parallel_samples_apart() -> None:
    first, other = ask([user("q")], "same", at=0), ask([user("q")], "same", at=1)
    next_one, next_other = ask(after(first, user("m")), "x", at=2), ask(after(first, user("m")), "y", at=3)
    graph, _ = build_branches([first, other, next_one, next_other])
    assert sorted(len(branch.spans) for branch in graph) == [2, 2]


def test_turns_without_logprobs_are_spans_that_say_so() -> None:
    first = ask([user("q")], "a")
    greedy = ask(after(first, user("m")), "b", sampling=GREEDY)
    third = ask(after(greedy, user("n")), "c")
    (branch,), _ = build_branches([first, greedy, third])
    assert spans(branch) == [(first.turn_id, 0), (greedy.turn_id, 0), (third.turn_id, 0)]
    reasons = [span.no_logprobs for span in branch.spans]
    assert reasons == [None, "truncated_sampling", None]
    assert (set(branch.spans[1].logprobs), branch.spans[1].temperature) == ({0.0}, 1.0)
    assert branch.sampled is not None
    assert spans(branch.sampled) == [(first.turn_id, 0), (third.turn_id, 0)]
    assert branch.sampled.token_ids == branch.token_ids


def test_branch_continues_with_the_longest_child_that_has_logprobs() -> None:
    first = ask([user("q")], "a")
    long = ask(after(first, user("m")), "a long answer", sampling=GREEDY, at=1)
    short = ask(after(first, user("n")), "b", at=2)
    graph, dialogues = build_branches([first, long, short])
    assert [spans(branch) for branch in graph] == [[(first.turn_id, 0), (short.turn_id, 0)], [(long.turn_id, 0)]]
    assert [dialogue.messages[-1].text for dialogue in dialogues] == ["b", "a long answer"]


def test_sampled_part_of_a_branch_ends_with_its_last_logprob() -> None:
    first = ask([user("q")], "a")
    greedy = ask(after(first, user("m")), "final", sampling=GREEDY)
    (branch,), (dialogue,) = build_branches([first, greedy])
    assert branch.token_ids == greedy.prompt_token_ids + greedy.choices[0].token_ids
    assert branch.sampled is not None
    assert branch.sampled.token_ids == render(first.messages) + first.choices[0].token_ids
    assert dialogue.messages[-1].text == "final"


def test_sequences_without_logprobs_are_the_last_branches() -> None:
    greedy = ask([user("q")], "a", sampling=GREEDY)
    (branch,), dialogues = build_branches([greedy])
    assert (branch.sampled, [dialogue.messages[-1].text for dialogue in dialogues]) == (None, ["a"])
    other = ask([user("r")], "b", at=1, sampling=GREEDY)
    more = ask(after(greedy, user("m")), "c", at=2, sampling=GREEDY)
    free = ask([user("s")], "d", at=3)
    _, dialogues = build_branches([other, more, greedy, free])
    assert [dialogue.messages[-1].text for dialogue in dialogues] == ["d", "c", "b"], "then as they began"


def test_branches_handle_very_long_sequences() -> None:
    turns = []
    prompt: tuple[int, ...] = (2,)
    for at in range(1200):
        turns.append(ask([user("q")], "x", at=at, prompt_token_ids=prompt))
        prompt += (*turns[-1].choices[0].token_ids, 7)
    (branch,), _ = build_branches(turns)
    assert len(branch.spans) == 1200


@st.composite
def conversations(draw: st.DrawFn) -> list[Turn]:
    """Draw random conversation trees: continued choices, repeated prompts, edited history, truncated and greedy
    answers."""
    turns: list[Turn] = []
    for at in range(draw(st.integers(1, 12))):
        texts = draw(st.lists(st.sampled_from(["a", "b", "aa", "ab", ""]), min_size=1, max_size=3))
        stop = draw(st.booleans())  # an empty answer that was cut off has no token at all
        messages = [user(draw(st.sampled_from(["q", "r"])))]
        prompt: tuple[int, ...] | None = None
        if turns and draw(st.sampled_from([True, True, True, False])):
            parents = [(turn, at) for turn in turns for at in range(len(turn.choices))]
            parent, choice = draw(st.sampled_from(parents))
            messages = after(parent, user(draw(st.sampled_from(["m", "n"]))), choice=choice)[-30:]
            kind = draw(st.sampled_from(["exact", "rendered", "continued"]))
            history = parent.prompt_token_ids + parent.choices[choice].token_ids
            if kind == "exact":
                prompt = (*history, 2, *text_ids(messages[-1].text), EOS, 3)
            elif kind == "continued":
                prompt = history
        greedy: dict[str, Any] = {"sampling": Sampling(temperature=0.0)}
        way = draw(st.sampled_from([{}, {}, {}, greedy, REPORTED, UNREPORTED]))
        turns.append(ask(messages, *texts, at=at % 3, stop=stop, prompt_token_ids=prompt, **way))
    return turns


def choices(turns: list[Turn]) -> dict[tuple[str, int], tuple[Turn, Choice]]:
    """Return the choices whose tokens must be in a span, by turn id and choice index."""
    return {
        (turn.turn_id, choice.index): (turn, choice) for turn in turns for choice in turn.choices if choice.token_ids
    }


@settings(max_examples=150)
@given(conversations(), st.randoms(use_true_random=False))
def test_p2_each_sampled_token_is_in_exactly_one_span(turns: list[Turn], shuffle: random.Random) -> None:
    graph, dialogues = build_branches(turns)
    expected = choices(turns)
    sampled_choices = [(span.turn_id, span.choice) for branch in graph for span in branch.spans]
    assert sorted(sampled_choices) == sorted(expected), "each exactly once"
    for branch in graph:
        for span in branch.spans:
            turn, choice = expected[span.turn_id, span.choice]
            assert branch.token_ids[: span.start] == turn.prompt_token_ids, "the context is what the engine saw"
            assert branch.token_ids[span.start : span.stop] == choice.token_ids
            assert (span.no_logprobs is None) == turn.recomputable
            assert span.logprobs == (choice.logprobs if turn.recomputable else (0.0,) * len(choice.logprobs))
            grammar = None if span.grammar is None else branch.grammars[span.grammar]
            assert grammar == turn.token_grammar
        assert len({*branch.grammars}) == len(branch.grammars)
        assert sum(branch.loss_mask) == sum(len(span.logprobs) for span in branch.spans)
        assert branch.spans[-1].stop == len(branch.token_ids)
    assert len(dialogues) == len(graph)
    for branch, dialogue in zip(graph, dialogues, strict=False):
        last = expected[branch.spans[-1].turn_id, branch.spans[-1].choice]
        assert (
            dialogue.messages[: len(last[0].messages)] == last[0].messages or dialogue.messages[-1].role == "assistant"
        )
    shuffled = list(turns)
    shuffle.shuffle(shuffled)
    assert build_branches(shuffled) == (graph, dialogues), "in whatever order they arrived"


@settings(max_examples=200)
@given(conversations(), st.randoms(use_true_random=False))
def test_p2_turns_that_extend_others_give_the_branches_of_whole_turns(turns: list[Turn], draw: random.Random) -> None:
    stored: list[Turn] = []
    for turn in turns:
        bases = [(other, at) for other in turns[: len(stored)] for at in range(len(other.choices))]
        base, choice = draw.choice(bases) if bases and draw.random() < 0.8 else (turn, 0)
        shares_tokens = base is not turn and base.prompt_token_ids[0] == turn.prompt_token_ids[0]
        stored.append(extending(turn, base, choice) if shares_tokens else turn)
    prompts = Prompts(draw.sample(stored, len(stored)))
    assert prompts.unresolved == {}
    assert build_branches(stored, prompts) == build_branches(turns)
    assert [prompts.whole_turn(turn.turn_id) for turn in turns] == turns
    history = TurnHistory()
    assert [history.whole_turn(turn) for turn in stored] == turns, "every other reader resolves them equally"


@settings(max_examples=100)
@given(conversations())
def test_branches_never_fork_without_need(turns: list[Turn]) -> None:
    graph, _ = build_branches([turn for turn in turns if turn.recomputable])
    for fork in graph:
        context = fork.token_ids[: fork.spans[0].start]
        for other in graph:
            if other is not fork and context[: len(other.token_ids)] == other.token_ids:
                continued = [
                    line
                    for line in graph
                    for span in line.spans
                    if line is not other and span.stop >= len(other.token_ids)
                    if line.token_ids[: span.stop] == context[: span.stop]
                ]
                assert continued, "it could have gone on from a line that ends here, and that is the longest"


Session = tuple[Sequence[TurnFacts], Sequence[RunListing]]


def digest(*values: object) -> bytes:
    return b"\0" + hashlib.blake2b(repr(values).encode(), digest_size=7).digest()


def facts_of_turn(
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
    return [facts_of_turn(n, PROMPT, reply=REPLY, request="x") for n in range(size)], []


def counted_retries(size: int) -> Session:
    return [facts_of_turn(n, PROMPT, request="x", retry=n % 50) for n in range(size)], []


def retries_of_a_continued_answer(size: int) -> Session:
    attempts = [facts_of_turn(n, PROMPT, reply=REPLY, request="x", retry=n) for n in range(size)]
    return [*attempts, facts_of_turn(size, PROMPT, REPLY, digest("next"))], []


def repeats(size: int) -> Session:
    return [facts_of_turn(n, PROMPT, request="x", repeats="t000000") for n in range(size)], []


def equal_answers(size: int) -> Session:
    answers = [facts_of_turn(n, PROMPT, reply=REPLY) for n in range(size // 2)]
    return [*answers, *(facts_of_turn(size + n, PROMPT, REPLY, digest("next", n)) for n in range(size // 2))], []


def rewritten_answers(size: int) -> Session:
    answers = [facts_of_turn(n, PROMPT, reply=digest("reply", n)) for n in range(size // 2)]
    return [
        *answers,
        *(facts_of_turn(size + n, PROMPT, digest("other"), digest("next", n)) for n in range(size // 2)),
    ], []


def listings(size: int) -> Session:
    return [facts_of_turn(n) for n in range(size)], [
        RunListing(frozenset([f"t{n:06}"]), None, None, n) for n in range(size)
    ]


def overlapping_listings(size: int) -> Session:
    pairs = [frozenset([f"t{n:06}", f"t{n + 1:06}"]) for n in range(size)]
    return [facts_of_turn(n) for n in range(size)], [RunListing(pair, None, None, n) for n, pair in enumerate(pairs)]


def listings_of_named_runs(size: int) -> Session:
    pairs = [frozenset([f"t{n:06}", f"t{n + 1:06}"]) for n in range(size)]
    return [facts_of_turn(n) for n in range(size)], [RunListing(pair, None, str(n), n) for n, pair in enumerate(pairs)]


SESSIONS = (
    equal_requests, counted_retries, retries_of_a_continued_answer, repeats, equal_answers, rewritten_answers, listings,
    overlapping_listings, listings_of_named_runs,
)  # fmt: skip


@pytest.mark.parametrize("session", SESSIONS)
def test_division_into_runs_costs_about_as_much_as_the_session_is_large(session: Callable[[int], Session]) -> None:
    small, large = (count_operations(partial(partition_runs, *session(size))) for size in (100, 800))
    assert large < 14 * small


@pytest.mark.parametrize("kind", ["a", "{} a", "a {}"])
def test_rewritten_answers_are_told_apart_by_their_contents_without_comparing_all(kind: str) -> None:
    def content_of(item: TurnFacts, number: int) -> TurnContent:
        texts = (f"reasons {kind}", kind)
        answer, echo = (Message(role="assistant", content=text.format(number)) for text in texts)
        question = Message(role="user", content="q")
        if len(item.prefixes) > 1:
            return TurnContent(b"\3" * 4, (b"",), (question, echo, question), (answer,))
        return TurnContent(b"\1" * 4, (b"\2" * 8,), (question,), (answer,))

    def divide(size: int) -> None:
        turns, _ = rewritten_answers(size)
        contents = {item.turn_id: content_of(item, number % (size // 2)) for number, item in enumerate(turns)}
        assert len(partition_runs(turns, [], contents).runs) < size

    small, large = (count_operations(partial(divide, size)) for size in (200, 1600))
    assert large < 14 * small


def test_long_prompts_are_not_compared_with_each_other() -> None:
    """1,600 turns with prompts of 100 messages took 15 s, in which no other session was served."""
    turns = [
        facts_of_turn(n, *(digest(n, position) for position in range(100)), request="x", retry=n % 2, repeats="t000000")
        for n in range(1600)
    ]
    began_s = time.thread_time()
    partition_runs(turns, [])
    assert time.thread_time() - began_s < 3.0
