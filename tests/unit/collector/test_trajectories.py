"""Fields of a trajectory: names, context, left-out turns and their reasons."""

from __future__ import annotations

from typing import Any

from headrace_collector.facts import turn_facts
from headrace_collector.retries import superseded_turns
from headrace_collector.trajectories import build_trajectory
from headrace_schemas import Choice, Feedback, FunctionDefinition, Grammar, Sampling, Tool, Trajectory, Turn
from tests.support.streams import START
from tests.support.turns import VERSION, after, ask, feedback, said, tool, user


def assembled(
    *turns: Turn, run: tuple[Feedback, ...] = (), session: tuple[Feedback, ...] = (), models: int = 1
) -> Trajectory:
    return build_trajectory(
        turns,
        superseded=superseded_turns([turn_facts(turn, START, offset) for offset, turn in enumerate(turns)]),
        about_run=run,
        about_session=session,
        reason="end_call",
        models=models,
        turns_from=0,
        now=START,
    )


def left_out(trajectory: Trajectory) -> dict[str, str]:
    return {item.turn_id: item.reason for item in trajectory.left_out}


def no_logprobs(trajectory: Trajectory) -> list[str | None]:
    return [span.no_logprobs for branch in trajectory.branches for span in branch.spans]


def tool_named(name: str, description: str = "") -> Tool:
    return Tool(function=FunctionDefinition(name=name, description=description))


def test_trajectory_id_is_derived_from_its_first_turn() -> None:
    a, b = ask([user("q")], at=0), ask([user("p")], at=1)
    assert assembled(a, b).trajectory_id == assembled(a).trajectory_id
    assert assembled(b).trajectory_id != assembled(a).trajectory_id
    assert assembled(a, b).started_at == a.started_at
    assert assembled(b, a).trajectory_id == assembled(b).trajectory_id, (
        "the first that was captured, whatever clocks say"
    )


def test_each_turn_is_in_a_branch_or_left_out() -> None:
    lost = ask([user("q")], "lost", at=0, delivered=False)
    retry = ask([user("q")], "call", at=5, retry=1)
    greedy = ask(after(retry, tool("r")), "x", at=6, sampling=Sampling(temperature=0.0))
    empty = ask([user("e")], "", at=7, stop=False)
    undelivered = ask([user("g")], "gone", at=8, delivered=False)
    trajectory = assembled(lost, retry, greedy, empty, undelivered)
    assert left_out(trajectory) == {
        lost.turn_id: "retried",
        empty.turn_id: "empty",
        undelivered.turn_id: "undelivered",
    }
    assert [branch.turn_ids for branch in trajectory.branches] == [(retry.turn_id, greedy.turn_id)]
    assert set(trajectory.turn_ids) == {turn.turn_id for turn in (lost, retry, greedy, empty, undelivered)}
    assert trajectory.versions == (VERSION,)


def test_truncated_sampling_has_no_logprobs() -> None:
    for sampling in (
        Sampling(top_p=0.9),
        Sampling(top_k=40),
        Sampling(presence_penalty=0.5),
        Sampling(frequency_penalty=-0.5),
    ):
        assert no_logprobs(assembled(ask([user("q")], sampling=sampling))) == ["truncated_sampling"]
    assert no_logprobs(assembled(ask([user("q")], sampling=Sampling(temperature=0.6, top_k=0)))) == [None]


def test_turn_under_a_grammar_has_no_logprobs_for_that_reason() -> None:
    first = ask([user("q")], "call", at=0)
    constrained = ask(
        after(first, tool("r")), "{}", at=1, sampling=Sampling(grammar=Grammar(response_format={"type": "json"}))
    )
    last = ask(after(constrained, user("go on")), "done", at=2)
    trajectory = assembled(first, constrained, last)
    (branch,) = trajectory.branches
    assert branch.turn_ids == (first.turn_id, constrained.turn_id, last.turn_id)
    assert branch.token_ids == last.prompt_token_ids + last.choices[0].token_ids
    assert no_logprobs(trajectory) == [None, "truncated_sampling (grammar)", None]
    assert trajectory.left_out == ()


def test_run_without_logprobs_has_a_branch_and_its_version() -> None:
    trajectory = assembled(ask([user("q")], "yes", sampling=Sampling(temperature=0.0)))
    assert no_logprobs(trajectory) == ["truncated_sampling"]
    assert (trajectory.final_answer, trajectory.versions) == ("yes", (VERSION,))


def test_choice_without_tokens_has_no_span() -> None:
    turn = ask([user("q")], "a")
    nothing = Choice(index=1, token_ids=(), logprobs=(), finish_reason="abort", message=said(""))
    turn = turn.model_copy(update={"choices": (*turn.choices, nothing)})
    trajectory = assembled(turn)
    assert [[span.choice for span in branch.spans] for branch in trajectory.branches] == [[0]]
    assert trajectory.left_out == ()


def test_run_id_comes_from_listing_feedback_then_turns_then_session_feedback() -> None:
    turn = ask([user("q")], task_id="turn")
    plain = ask([user("q")])
    about = feedback("s", turn, task_id="listed", run_id="1")
    general = feedback("s", task_id="session", run_id="2")
    assert (assembled(turn, run=(about,), session=(general,)).task_id) == "listed"
    assert (assembled(turn, session=(general,)).task_id, assembled(turn, session=(general,)).run_id) == ("turn", "2")
    assert assembled(plain, session=(general,)).task_id == "session"


def test_context_is_merged_and_the_newest_wins() -> None:
    turn = ask([user("q")])
    old = feedback("s", turn, at=1, context={"expected": "a", "kept": 1})
    new = feedback("s", turn, at=2, context={"expected": "b"})
    assert assembled(turn, run=(old, new)).context == {"expected": "b", "kept": 1}


def test_oversized_context_drops_the_oldest() -> None:
    turn = ask([user("q")])
    sets: list[dict[str, Any]] = [{f"{name}{n}": n for n in range(40)} for name in "ab"]
    trajectory = assembled(turn, session=tuple(feedback("s", context=context) for context in sets)).context
    assert len(trajectory) == 64
    assert all(f"b{n}" in trajectory for n in range(40))


def test_parts_count_sessions_and_models_of_a_run() -> None:
    first_session, second_session = ask([user("q")], session="here"), ask([user("q")], session="there")
    assert assembled(first_session, run=(feedback("here", first_session, second_session),)).parts == 2
    assert assembled(first_session, run=(feedback("here", first_session, second_session),), models=2).parts == 4
    assert assembled(first_session, run=(feedback("here", first_session),)).parts == 1


def test_purpose_of_evaluation_traffic_is_kept() -> None:
    assert assembled(ask([user("q")], at=0), ask([user("q")], at=1, purpose="eval")).purpose == "eval"


def test_shadow_trajectory_names_its_original_session() -> None:
    trajectory = assembled(ask([user("q")], purpose="eval", shadow_of="a" * 16))
    assert (trajectory.purpose, trajectory.shadow_of) == ("eval", "a" * 16)
    assert assembled(ask([user("q")])).shadow_of is None


def test_trajectory_states_that_a_registered_version_answered() -> None:
    assert assembled(ask([user("q")], at=0), ask([user("q")], at=1, untrained="registered")).untrained == "registered"
    assert assembled(ask([user("q")])).untrained is None


def test_tools_are_those_of_all_turns() -> None:
    first = ask([user("q")], at=0, tools=(tool_named("a", "old"), tool_named("b")))
    second = ask([user("q")], at=1, tools=(tool_named("a", "new"),))
    trajectory = assembled(first, second).tools
    assert [(estimate.function.name, estimate.function.description) for estimate in trajectory] == [
        ("a", "new"),
        ("b", ""),
    ]
