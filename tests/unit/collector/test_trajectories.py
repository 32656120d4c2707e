"""What a trajectory says about its run: names, context, what was left out and why."""

from __future__ import annotations

from typing import Any

from headrace_collector.facts import facts_of
from headrace_collector.retries import superseded
from headrace_collector.trajectories import trajectory
from headrace_schemas import Choice, Feedback, FunctionDefinition, Grammar, Sampling, Tool, Trajectory, Turn
from tests.support.streams import START
from tests.support.turns import VERSION, after, ask, feedback, said, tool, user


def made(
    *turns: Turn, run: tuple[Feedback, ...] = (), session: tuple[Feedback, ...] = (), models: int = 1
) -> Trajectory:
    return trajectory(
        turns,
        given_up=superseded([facts_of(turn, START, place) for place, turn in enumerate(turns)]),
        about_run=run,
        about_session=session,
        reason="end_call",
        models=models,
        turns_from=0,
        now=START,
    )


def left_out(found: Trajectory) -> dict[str, str]:
    return {item.turn_id: item.reason for item in found.left_out}


def tool_named(name: str, description: str = "") -> Tool:
    return Tool(function=FunctionDefinition(name=name, description=description))


def test_its_id_follows_from_its_first_turn() -> None:
    a, b = ask([user("q")], at=0), ask([user("p")], at=1)
    assert made(a, b).trajectory_id == made(a).trajectory_id
    assert made(b).trajectory_id != made(a).trajectory_id
    assert made(a, b).started_at == a.started_at
    assert made(b, a).trajectory_id == made(b).trajectory_id, "the first that was captured, whatever clocks say"


def test_every_turn_is_in_a_branch_or_left_out_with_a_reason() -> None:
    lost = ask([user("q")], "lost", at=0, delivered=False)
    retry = ask([user("q")], "call", at=5, retry=1)
    greedy = ask(after(retry, tool("r")), "x", at=6, sampling=Sampling(temperature=0.0))
    empty = ask([user("e")], "", at=7, stop=False)
    gone = ask([user("g")], "gone", at=8, delivered=False)
    found = made(lost, retry, greedy, empty, gone)
    assert left_out(found) == {
        lost.turn_id: "retried",
        greedy.turn_id: "truncated_sampling",
        empty.turn_id: "empty",
        gone.turn_id: "undelivered",
    }
    assert [branch.turn_ids for branch in found.branches] == [(retry.turn_id,)]
    assert set(found.turn_ids) == {turn.turn_id for turn in (lost, retry, greedy, empty, gone)}
    assert found.versions == (VERSION,)


def test_top_p_top_k_and_penalties_cannot_be_trained() -> None:
    for sampling in (
        Sampling(top_p=0.9),
        Sampling(top_k=40),
        Sampling(presence_penalty=0.5),
        Sampling(frequency_penalty=-0.5),
    ):
        assert list(left_out(made(ask([user("q")], sampling=sampling))).values()) == ["truncated_sampling"]
    assert left_out(made(ask([user("q")], sampling=Sampling(temperature=0.6, top_k=0)))) == {}


def test_what_a_grammar_held_is_context_and_says_so() -> None:
    """Its probabilities are those of the grammar's tokens alone, which no trainer recomputes."""
    first = ask([user("q")], "call", at=0)
    held = ask(
        after(first, tool("r")), "{}", at=1, sampling=Sampling(grammar=Grammar(response_format={"type": "json"}))
    )
    last = ask(after(held, user("go on")), "done", at=2)
    found = made(first, held, last)
    (branch,) = found.branches
    assert branch.turn_ids == (first.turn_id, last.turn_id)
    assert branch.token_ids == last.prompt_token_ids + last.choices[0].token_ids, "the answer is there, and not trained"
    reasons = [(turn.turn_id, turn.full_reason) for turn in found.left_out]
    assert reasons == [(held.turn_id, "truncated_sampling (grammar)")]
    narrow = ask([user("q")], sampling=Sampling(top_p=0.5))
    assert [one.full_reason for one in made(narrow).left_out] == ["truncated_sampling"]


def test_a_run_with_nothing_to_train_still_has_its_dialogue_and_version() -> None:
    found = made(ask([user("q")], "yes", sampling=Sampling(temperature=0.0)))
    assert (found.branches, found.final_answer, found.versions) == ((), "yes", (VERSION,))


def test_a_choice_without_tokens_is_no_span() -> None:
    turn = ask([user("q")], "a")
    nothing = Choice(index=1, token_ids=(), logprobs=(), finish_reason="abort", message=said(""))
    turn = turn.model_copy(update={"choices": (*turn.choices, nothing)})
    found = made(turn)
    assert [[span.choice for span in branch.spans] for branch in found.branches] == [[0]]
    assert found.left_out == ()


def test_what_lists_the_run_names_it_first_then_its_turns_then_what_is_about_the_session() -> None:
    turn = ask([user("q")], task_id="turn")
    plain = ask([user("q")])
    about = feedback("s", turn, task_id="listed", run_id="1")
    general = feedback("s", task_id="session", run_id="2")
    assert (made(turn, run=(about,), session=(general,)).task_id) == "listed"
    assert (made(turn, session=(general,)).task_id, made(turn, session=(general,)).run_id) == ("turn", "2")
    assert made(plain, session=(general,)).task_id == "session"


def test_context_is_merged_and_the_newest_wins() -> None:
    turn = ask([user("q")])
    old = feedback("s", turn, at=1, context={"expected": "a", "kept": 1})
    new = feedback("s", turn, at=2, context={"expected": "b"})
    assert made(turn, run=(old, new)).context == {"expected": "b", "kept": 1}


def test_too_much_context_drops_the_oldest() -> None:
    turn = ask([user("q")])
    sets: list[dict[str, Any]] = [{f"{name}{n}": n for n in range(40)} for name in "ab"]
    found = made(turn, session=tuple(feedback("s", context=context) for context in sets)).context
    assert len(found) == 64
    assert all(f"b{n}" in found for n in range(40))


def test_a_run_over_several_sessions_or_models_counts_its_parts() -> None:
    here, there = ask([user("q")], session="here"), ask([user("q")], session="there")
    assert made(here, run=(feedback("here", here, there),)).parts == 2
    assert made(here, run=(feedback("here", here, there),), models=2).parts == 4
    assert made(here, run=(feedback("here", here),)).parts == 1


def test_held_out_traffic_stays_held_out() -> None:
    assert made(ask([user("q")], at=0), ask([user("q")], at=1, purpose="eval")).purpose == "eval"


def test_a_shadow_says_whose_prompt_it_was() -> None:
    found = made(ask([user("q")], purpose="eval", shadow_of="a" * 16))
    assert (found.purpose, found.shadow_of) == ("eval", "a" * 16)
    assert made(ask([user("q")])).shadow_of is None


def test_a_run_in_which_a_registered_version_spoke_says_so() -> None:
    assert made(ask([user("q")], at=0), ask([user("q")], at=1, untrained="registered")).untrained == "registered"
    assert made(ask([user("q")])).untrained is None


def test_tools_are_those_that_any_turn_offered() -> None:
    first = ask([user("q")], at=0, tools=(tool_named("a", "old"), tool_named("b")))
    second = ask([user("q")], at=1, tools=(tool_named("a", "new"),))
    found = made(first, second).tools
    assert [(one.function.name, one.function.description) for one in found] == [("a", "new"), ("b", "")]
