"""Tests of runs, of the end of a training step on tasks, of evaluations with intervals, and of gate programs."""

from __future__ import annotations

import io
import json
import math
import os
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from headrace.errors import HeadraceError, Unreachable, UsageError
from headrace.evaluation import evaluate, interval, serve_gate
from headrace.practice import OutcomeWatch, Run, plugged, train_on_tasks
from headrace_integrations.practice.runs import task_id_of
from headrace_schemas import (
    Branch,
    Experience,
    LeftOut,
    RevertedOutcome,
    Span,
    TrainingMetrics,
    TrainingOutcome,
    Trajectory,
)
from headrace_schemas.values.ids import session_key
from tests.unit.integrations.conftest import VERSION, Bus, RecordingGatewayStack

NOW = datetime(2026, 1, 1, tzinfo=UTC)
NOTHING = "tiny@ffffffffffffffff"


def trajectory(session: str, branches: int = 1, **more: Any) -> Trajectory:
    branch = Branch(
        token_ids=(1, 2, 3), spans=(Span(start=1, logprobs=(-0.5, -0.5), turn_id=f"{session}-turn", version=VERSION),)
    )
    fields = {"branches": (branch,) * branches, "end_reason": "feedback", "started_at": NOW, **more}
    key = session_key("default", session)
    return Trajectory(
        time=NOW, trajectory_id=f"t-{session}", session_key=key, session_id=session, model="tiny", **fields
    )


def account(number: int, *outcomes: TrainingOutcome, **more: Any) -> TrainingMetrics:
    return TrainingMetrics(time=NOW, model="tiny", lineage="main", step=1, account=number, verdicts=outcomes, **more)


def trained(session: str, branch: int = 0, dropped: Any = None) -> TrainingOutcome:
    of = Experience.id_of(f"t-{session}", branch)
    return TrainingOutcome(experience_id=of, revision=0, turn_ids=(f"{session}-turn",), dropped=dropped)


class TurnKey:
    """Turn of which only the key is read."""

    topic = "turns"

    def __init__(self, session: str) -> None:
        self.key = session_key("default", session)


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Bus:
    memory_bus = Bus()
    monkeypatch.setattr("headrace_integrations.practice.training.connected", memory_bus.connected)
    return memory_bus


def add_turns(bus: Bus, *sessions: str) -> None:
    bus.events.setdefault("turns", []).extend(TurnKey(session) for session in sessions)  # type: ignore[misc]


async def test_session_outcome_is_complete_when_all_branches_are(bus: Bus) -> None:
    watch = OutcomeWatch(RecordingGatewayStack())
    add_turns(bus, "s")
    bus.add(trajectory("s", branches=2), account(1, trained("s", 0), version=VERSION))
    with pytest.raises(Unreachable, match=r"1 of 1 sessions have no training outcome"):
        await watch.until_known(["s"], 0.0)
    bus.add(account(2, trained("s", 1, "stale"), version=NOTHING))
    outcomes = await watch.until_known(["s"], 0.0)
    assert (outcomes["s"].trained, outcomes["s"].dropped, outcomes["s"].version) == (1, ("stale",), NOTHING)


async def test_session_without_a_call_has_an_outcome_at_once(bus: Bus) -> None:
    outcomes = await OutcomeWatch(RecordingGatewayStack()).until_known(["silent"], 0.0)
    assert outcomes["silent"].trajectory is None
    assert outcomes["silent"].trained == 0


async def test_left_out_and_untrained_sessions_have_their_reason(bus: Bus) -> None:
    add_turns(bus, "a", "b")
    left = LeftOut(turn_id="a-turn", reason="truncated_sampling")
    bus.add(trajectory("a", branches=0, left_out=(left,)), trajectory("b", untrained="registered"))
    outcomes = await OutcomeWatch(RecordingGatewayStack()).until_known(["a", "b"], 0.0)
    assert outcomes["a"].dropped == ("truncated_sampling",)
    assert outcomes["b"].dropped == ("registered",)


async def test_undone_and_queued_outcomes_are_awaited_again(bus: Bus) -> None:
    watch = OutcomeWatch(RecordingGatewayStack())
    add_turns(bus, "s")
    undone = RevertedOutcome(experience_id=Experience.id_of("t-s", 0), revision=0, queued=True)
    bus.add(trajectory("s"), account(1, trained("s")), account(2, undone=(undone,)))
    with pytest.raises(Unreachable):
        await watch.until_known(["s"], 0.0)
    bus.add(account(3, trained("s")))
    assert (await watch.until_known(["s"], 0.0))["s"].trained == 1
    dropped_again = undone.model_copy(update={"queued": False})
    bus.add(account(4, undone=(dropped_again,)))
    assert (await watch.until_known(["s"], 0.0))["s"].dropped == ("undone",)


async def test_reports_of_other_models_are_ignored(bus: Bus) -> None:
    add_turns(bus, "s")
    other = account(1, trained("s")).model_copy(update={"model": "other"})
    bus.add(trajectory("s"), other)
    with pytest.raises(Unreachable):
        await OutcomeWatch(RecordingGatewayStack()).until_known(["s"], 0.0)


async def test_agents_of_one_run_have_sessions_and_rewards_of_their_own() -> None:
    stack = RecordingGatewayStack()

    async def play(_task: Any, run: Run) -> None:
        for role in ("wolf", "villager", "moderator"):
            run.session(role)
        run.reward(parts={"win": 1.0, "blame": 0.5}, role="wolf", metrics={"rounds": 3})
        run.reward(-1.0, role="villager")

    async with stack.async_client() as client:
        run = Run(stack, client, {"task_id": "game"}, purpose="train", model="tiny")
        await run.execute(play)
    bodies = [body for path, body in stack.gateway.posted if path == "/v1/feedback"]
    assert [(body["value"], body["task_id"]) for body in bodies] == [(1.5, "game/wolf"), (-1.0, "game/villager")]
    assert {body["run_id"] for body in bodies} == {run.run_id}
    assert bodies[0]["context"] == {"parts": {"win": 1.0, "blame": 0.5}, "metrics": {"rounds": 3}}
    assert all(body["ends_session"] for body in bodies)
    assert stack.gateway.ended == 1, "who got no reward is ended without one"
    assert run.value == 0.25
    assert run.metrics == {"rounds": 3}


async def test_a_run_of_an_evaluation_sends_no_reward() -> None:
    stack = RecordingGatewayStack()

    async def play(_task: Any, run: Run) -> str:
        run.session()
        run.reward(1.0)
        return "done"

    async with stack.async_client() as client:
        run = Run(stack, client, {}, purpose="eval", model=VERSION, needs_reward=False)
        await run.execute(play)
    assert run.result == "done"
    assert stack.gateway.values == []


async def test_a_step_without_any_reward_is_refused(bus: Bus) -> None:
    async def play(_task: Any, _run: Run) -> None:
        raise RuntimeError("no tool")

    with pytest.raises(UsageError, match="none of 2 runs has a reward; the first error: RuntimeError: no tool"):
        async for _ in train_on_tasks(RecordingGatewayStack(), ["t"], play, group_size=2, tasks_per_step=1):
            pass


@pytest.mark.parametrize("sizes", [{"tasks_per_step": 2}, {"tasks_per_step": 0}, {"group_size": 0}, {"steps": 0}])
async def test_invalid_sizes_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        async for _ in train_on_tasks(
            RecordingGatewayStack(), ["t"], lambda _task, _run: None, **{"tasks_per_step": 1, **sizes}
        ):
            pass


def test_equal_tasks_share_an_id() -> None:
    assert task_id_of({"a": 1, "b": 2}) == task_id_of({"b": 2, "a": 1}) != task_id_of({"a": 1})
    assert task_id_of({"task_id": "mine"}) == "mine"
    assert task_id_of({"id": 7}) == "7"


class Client:
    """Stand-in for an OpenAI client, which returns a copy of itself with other options."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def with_options(self, **options: Any) -> Client:
        return Client(**options)


def test_plugged_redirects_and_restores_the_agents_client() -> None:
    class Inner:
        client = Client()
        model_name = "gpt"

    class Agent:
        model = Inner()

    agent = Agent()
    before = agent.model.client
    with plugged(agent, "http://g/v1", {"X-Session-Id": "s"}, "tiny", None):
        led = agent.model.client.options
        assert led == {"base_url": "http://g/v1", "api_key": "-", "default_headers": {"X-Session-Id": "s"}}
        assert agent.model.model_name == "tiny"
    assert agent.model.client is before
    assert agent.model.model_name == "gpt"
    with pytest.raises(UsageError, match="has no OpenAI client"), plugged(object(), "", {}, "", None):
        pass


def test_interval_of_shares_is_wilsons() -> None:
    """Compare with Newcombe (1998), Statistics in Medicine 17, table I, method 3."""
    for hits, of, low, high in ((81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)):
        bounds = interval([1.0] * hits + [0.0] * (of - hits))
        assert bounds is not None
        assert bounds == pytest.approx((low, high), abs=5e-5)


def test_interval_of_other_numbers_is_students_t() -> None:
    """The expected values are: mean 5, standard deviation 1 and n = 4 give 5 +- 3.1824 / 2."""
    values = [5 + math.sqrt(1.5), 5 - math.sqrt(1.5), 5.0, 5.0]
    bounds = interval(values)
    assert bounds == pytest.approx((5 - 1.5912, 5 + 1.5912), rel=0.01)
    assert interval([3.0]) is None
    assert interval([]) is None


async def play(task: Mapping[str, Any], run: Run) -> str:
    assert run.model == VERSION
    if task["question"] == "broken":
        raise RuntimeError("no tool")
    await run.openai().chat.completions.create()
    return str(task["question"])


def accuracy_of(task: Mapping[str, Any], answer: str) -> float | None:
    if answer == "unknown":
        return None
    if answer == "odd":
        raise ValueError("the judge was not reached")
    return float(answer == task["answer"])


async def test_failures_and_abstentions_are_excluded_from_means() -> None:
    stack = RecordingGatewayStack()
    rows = [("a", "a"), ("b", "c"), ("unknown", ""), ("odd", ""), ("broken", "")]
    tasks = [{"question": question, "answer": answer} for question, answer in rows]
    evaluation = await evaluate(stack, tasks, play, {"accuracy": accuracy_of})
    mean = evaluation.means["accuracy"]
    assert (mean.mean, mean.plays, mean.abstained, mean.failed) == (0.5, 2, 1, 1)
    assert (evaluation.version, evaluation.plays, evaluation.errors) == (VERSION, 5, ("RuntimeError: no tool",))
    assert str(mean).startswith("0.5 (")
    assert stack.gateway.values == []
    assert all(headers["X-Headrace-Purpose"] == "eval" for headers in stack.clients)


async def test_invalid_evaluations_are_refused() -> None:
    stack = RecordingGatewayStack()
    with pytest.raises(UsageError, match="name an exact version"):
        await evaluate(stack, [{}], play, {"accuracy": accuracy_of}, version="tiny")
    with pytest.raises(UsageError, match="tasks, metrics and plays: must not be empty"):
        await evaluate(stack, [], play, {"accuracy": accuracy_of})
    with pytest.raises(UsageError, match="the first error: RuntimeError: no tool"):
        await evaluate(stack, [{"question": "broken", "answer": ""}], play, {"accuracy": accuracy_of})


def gated(play_lines: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    stack = RecordingGatewayStack()
    monkeypatch.setattr("headrace_integrations.evaluation.Stack", lambda *_: stack)
    gate, audit = {"g": {"question": "a", "answer": "a"}}, {"x": {"question": "broken", "answer": ""}}
    gate |= {"odd": {"question": "odd", "answer": ""}}
    out = io.StringIO()
    lines = io.StringIO("".join(json.dumps(line) + "\n" for line in play_lines))
    serve_gate(gate, audit, play, accuracy_of, base_url="http://gateway/v1", lines=lines, out=out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def test_a_gate_program_names_its_tasks_and_scores_plays(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [{"version": VERSION, "task": task, "seed": 1} for task in ("g", "x")]
    first, *played = gated(requests, monkeypatch)
    assert first == {"gate": ["g", "odd"], "audit": ["x"]}
    assert {result["task"]: result["score"] for result in played} == {"g": 1.0, "x": 0.0}, (
        "an agent that fails scores 0 here"
    )


def test_a_score_that_fails_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ExceptionGroup) as caught:
        gated([{"version": VERSION, "task": "odd", "seed": 1}], monkeypatch)
    assert caught.group_contains(HeadraceError, match="the score function failed")


def test_a_score_that_fails_ends_the_program_while_its_input_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The registry keeps stdin open while it waits for answers, so a program that waits for its end would deadlock."""
    stack = RecordingGatewayStack()
    monkeypatch.setattr("headrace_integrations.evaluation.Stack", lambda *_: stack)
    reading, writing = os.pipe()
    with os.fdopen(reading) as lines, os.fdopen(writing, "w") as requests:
        print(json.dumps({"version": VERSION, "task": "odd", "seed": 1}), file=requests, flush=True)
        ended: list[BaseException] = []

        def serve() -> None:
            try:
                tasks = {"odd": {"question": "odd", "answer": ""}}
                serve_gate(
                    tasks, {"x": {}}, play, accuracy_of, base_url="http://gateway/v1", lines=lines, out=io.StringIO()
                )
            except ExceptionGroup as group:
                ended.append(group)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        thread.join(10)
        groups = [error for error in ended if isinstance(error, ExceptionGroup)]
        assert [group.subgroup(HeadraceError) is not None for group in groups] == [True]
        requests.close()
        thread.join(10)
