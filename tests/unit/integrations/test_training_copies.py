"""Tests of training copies: the requests that are replayed, their agents and tools, and no effects on users."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.shadow import (
    ExplicitMarkingStrategy,
    HeadraceSink,
    SamplingRateStrategy,
    ServedRequest,
    TrainingCopy,
    TrainingRunner,
    TrajectorySink,
    TrinitySink,
    WriteRefused,
    mark,
    read_only,
)
from headrace_integrations.practice.sinks import TrinityRun
from tests.unit.integrations.conftest import RecordingGatewayStack

ALL = SamplingRateStrategy(1.0)


def answering(copy: TrainingCopy) -> Callable[[str], str]:
    """Return an agent that calls the model of `copy` once."""
    client = copy.openai(blocking=True)

    def ask(text: str) -> str:
        completion = client.chat.completions.create(model=copy.model, messages=[{"role": "user", "content": text}])
        return str(completion.choices[0].message.content)

    return ask


def by_answer(copy: TrainingCopy) -> float:
    return float(len(copy.answer))


def played(
    *requests: str,
    stack: RecordingGatewayStack | None = None,
    make: Any = answering,
    reward: Any = by_answer,
    **options: Any,
) -> tuple[RecordingGatewayStack, TrainingRunner]:
    """Run users' requests, all of which are answered, and return the stack and the training runner."""
    stack = stack or RecordingGatewayStack()
    with TrainingRunner(HeadraceSink(stack), make, reward, **{"selection": ALL, **options}) as runner:
        ask = runner.watched(lambda text: f"served {text}")
        assert [ask(text) for text in requests] == [f"served {text}" for text in requests]
    return stack, runner


def feedback(stack: RecordingGatewayStack) -> list[dict[str, Any]]:
    return [body for path, body in stack.gateway.posted if path.endswith("feedback")]


def test_request_is_replayed_repeat_times_as_one_group() -> None:
    stack, runner = played("one", "two", repeat=4)
    sent = feedback(stack)
    assert [body["value"] for body in sent] == [float(len("it is 4"))] * 8
    assert all(body["ends_session"] for body in sent)
    assert len({body["session_id"] for body in sent}) == 8
    tasks = [body["task_id"] for body in sent]
    assert sorted(tasks.count(task) for task in set(tasks)) == [4, 4]
    assert (runner.counts.offered, runner.counts.selected, runner.counts.rewarded) == (2, 2, 8)


def test_a_share_is_sampled() -> None:
    draws = iter([0.05, 0.5, 0.0999, 0.1])
    chosen = SamplingRateStrategy(0.1, draw=lambda: next(draws))
    assert [chosen.should_select(ServedRequest(number)) for number in range(4)] == [True, False, True, False]
    assert not SamplingRateStrategy(0.0).should_select(ServedRequest(""))
    with pytest.raises(ValueError, match=r"rate = 1\.5"):
        SamplingRateStrategy(1.5)


def test_only_marked_requests_are_played() -> None:
    stack = RecordingGatewayStack()
    sink = HeadraceSink(stack)
    with TrainingRunner(sink, answering, by_answer, selection=ExplicitMarkingStrategy("liked")) as runner:
        ask = runner.watched(lambda text: text)
        ask("not marked")
        with mark("liked", task_id="t-1"):
            ask("marked")
            with mark("long"):
                ask("marked twice")
        with mark("long"):
            ask("marked otherwise")
    assert [body["task_id"] for body in feedback(stack)] == ["t-1", "t-1"]
    assert runner.counts.selected == 2
    assert ExplicitMarkingStrategy().should_select(ServedRequest("", labels=frozenset({"any"})))
    with pytest.raises(ValueError, match="labels: must not be empty"), mark():
        pass


def test_an_own_strategy_decides_and_its_error_selects_nothing() -> None:
    class Longer:
        def should_select(self, request: ServedRequest) -> bool:
            if request.inputs == "broken":
                raise RuntimeError("no idea")
            return len(request.answer) > len("served ab")

    _, runner = played("ab", "broken", "abc", selection=Longer())
    assert runner.counts.selected == 1
    assert runner.last_error == "RuntimeError: no idea"


@pytest.mark.parametrize("swallowed", [False, True])
def test_only_tools_marked_read_only_are_called(swallowed: bool) -> None:
    sent: list[str] = []
    refused: list[str] = []

    @read_only
    def search(query: str) -> str:
        """Look it up."""
        return f"found {query}"

    def send_mail(text: str) -> str:
        sent.append(text)
        return "sent"

    def make(copy: TrainingCopy) -> Callable[[str], str]:
        tools, _client = copy.tools({"search": search, "send_mail": send_mail}), copy.openai(blocking=True)
        assert tools["search"].__doc__ == "Look it up."

        def ask(text: str) -> str:
            hits: str = tools["search"](text)
            if text == "write":
                try:
                    tools["send_mail"](hits)
                except WriteRefused as error:
                    refused.append(error.tool)
                    if not swallowed:
                        raise
            return hits

        return ask

    stack, runner = played("read", "write", make=make, reward=lambda copy: float(copy.called == ["search"]))
    assert (sent, refused) == ([], ["send_mail"])
    assert [body["value"] for body in feedback(stack)] == [1.0]
    assert (runner.counts.failed, runner.counts.refused) == (1, 1)
    assert runner.last_error is not None
    assert runner.last_error.startswith("WriteRefused: send_mail is not marked as read-only")


async def test_tools_that_await_and_lists_of_tools() -> None:
    @read_only
    async def look(query: str) -> str:
        return query

    async def write() -> None:
        raise AssertionError("it was called")

    copy = TrainingCopy(
        HeadraceSink(RecordingGatewayStack()).run(RecordingGatewayStack().async_client(), "t", 0), ServedRequest("x")
    )
    looking, writing = copy.tools([look, write])
    assert await looking("x") == "x"
    with pytest.raises(WriteRefused, match="write is not marked as read-only"):
        await writing()
    assert (copy.called, copy.refused) == (["look"], ["write"])
    with pytest.raises(UsageError, match="cannot be called"):
        copy.tools({"thing": "no function"})  # type: ignore[dict-item]


def fail(*_: Any) -> Any:
    raise RuntimeError("it went wrong")


@pytest.mark.parametrize(
    ("make", "reward", "counted"),
    [
        (fail, by_answer, "failed"),
        (lambda _copy: fail, by_answer, "failed"),
        (answering, fail, "failed"),
        (answering, lambda _copy: None, "unrewarded"),
        (answering, lambda _copy: float("nan"), "failed"),
        (answering, lambda _copy: True, "failed"),
    ],
    ids=["maker", "agent", "judge", "no reward", "nan", "bool"],
)
def test_failed_copy_has_no_reward_and_does_not_affect_users(make: Any, reward: Any, counted: str) -> None:
    stack, runner = played("one", make=make, reward=reward)
    assert feedback(stack) == []
    assert getattr(runner.counts, counted) == 1
    assert runner.counts.rewarded == 0


def test_a_run_that_takes_too_long_has_failed() -> None:
    async def slow(_text: str) -> str:
        import asyncio

        await asyncio.sleep(60)
        return "late"

    _, runner = played("one", make=lambda _copy: slow, run_timeout_s=0.05)
    assert runner.counts.failed == 1


def test_users_do_not_wait_and_pending_requests_are_bounded() -> None:
    gate, most, now = threading.Event(), 0, 0
    lock = threading.Lock()

    def make(copy: TrainingCopy) -> Callable[[str], str]:
        def ask(_text: str) -> str:
            nonlocal most, now
            with lock:
                now += 1
                most = max(most, now)
            assert gate.wait(20)
            with lock:
                now -= 1
            return "done"

        return ask

    stack = RecordingGatewayStack()
    runner = TrainingRunner(HeadraceSink(stack), make, by_answer, selection=ALL, repeat=3, at_once=2, waiting_max=5)
    with runner:
        ask = runner.watched(str.upper)
        began = time.monotonic()
        assert [ask("x") for _ in range(50)] == ["X"] * 50
        assert time.monotonic() - began < 2
        assert runner.counts.missed == 45
        while most < 2:
            time.sleep(0.01)
        gate.set()
    assert most == 2
    assert runner.counts.selected == 5


def test_unfinished_requests_are_abandoned_at_the_end() -> None:
    gate = threading.Event()
    runner = TrainingRunner(HeadraceSink(RecordingGatewayStack()), lambda _copy: lambda _text: gate.wait(20), by_answer)
    runner.selection = ALL
    runner.start()
    runner.offer("x")
    while runner.counts.selected == 0:
        time.sleep(0.01)
    runner.stop(timeout_s=0.05)
    gate.set()
    assert (runner.counts.abandoned, runner.counts.rewarded) == (1, 0)
    runner.offer("y")
    assert runner.counts.missed == 1
    with pytest.raises(UsageError, match="create another runner"):
        runner.start()
    with pytest.raises(UsageError, match="is not running"):
        runner.commit()


def test_failed_commit_does_not_hide_the_first_error() -> None:
    class Closed(HeadraceSink):
        async def commit(self, client: Any) -> None:
            raise UsageError("no")

    runner = TrainingRunner(Closed(RecordingGatewayStack()), answering, by_answer)
    with pytest.raises(UsageError, match="no"):
        runner.start().stop()
    with (
        pytest.raises(RuntimeError, match="first") as caught,
        TrainingRunner(Closed(RecordingGatewayStack()), fail, fail),
    ):
        raise RuntimeError("first")
    assert caught.value.__notes__ == ["and the last commit failed: no"]


async def test_an_agent_that_awaits_and_inputs_that_change() -> None:
    seen: list[Any] = []

    class Agent:
        """Agent that appends to its input."""

        async def run(self, messages: list[str]) -> str:
            messages.append("changed")
            return "done"

    def make(_copy: TrainingCopy) -> Callable[[Any], str]:
        def ask(messages: list[str]) -> str:
            seen.append(list(messages))
            messages.append("changed")
            return "."

        return ask

    with TrainingRunner(HeadraceSink(RecordingGatewayStack()), make, by_answer, selection=ALL, repeat=2) as runner:
        ask = runner.watched(Agent().run)
        assert await ask(["hello"]) == "done"
        assert runner.watched(lambda lock: "fine")(threading.Lock()) == "fine"  # cannot be copied
    assert seen == [["hello"], ["hello"]]
    assert runner.counts.missed == 1


def numbered() -> Callable[..., Any]:
    """Return a replacement of the `openai` module whose answers have ids as `TrinitySink` records them."""
    numbers = iter(range(1000))

    def client(*_: Any, **__: Any) -> Any:
        def create(**_: Any) -> Any:
            message = SimpleNamespace(content="four")
            return SimpleNamespace(id=f"chatcmpl-{next(numbers)}", choices=[SimpleNamespace(message=message)])

        return SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)), close=lambda: None)

    return client


def test_trinity_sink_sends_the_requests_of_the_java_client() -> None:
    stack = RecordingGatewayStack()
    stack.openai = numbered()  # type: ignore[method-assign]

    def twice(copy: TrainingCopy) -> Callable[[str], str]:
        ask = answering(copy)
        return lambda text: ask(text) + ask(text)

    options: dict[str, Any] = {"selection": ALL, "repeat": 2, "at_once": 1}
    with TrainingRunner(TrinitySink(stack), twice, by_answer, **options) as runner, mark("any", task_id="task-1"):
        runner.watched(str)("x")
    feedbacks, commits = stack.gateway.posted[:-1], stack.gateway.posted[-1:]
    assert feedbacks == [
        ("/feedback", {"msg_ids": [f"chatcmpl-{2 * run}", f"chatcmpl-{2 * run + 1}"], "reward": 8.0,
                       "task_id": "task-1", "run_id": str(run)})
        for run in range(2)
    ]  # fmt: skip
    assert commits == [("/commit", {"task_id": None, "run_id": None, "time_threshold": None})]


def test_trinity_sink_commits_periodically_and_refuses_streams() -> None:
    stack = RecordingGatewayStack()
    stack.openai = numbered()  # type: ignore[method-assign]

    def streaming(copy: TrainingCopy) -> Callable[[str], Any]:
        client = copy.openai(blocking=True)
        return lambda _text: client.chat.completions.create(model=copy.model, stream=True)

    sink: TrajectorySink = TrinitySink(stack)
    with TrainingRunner(sink, streaming, lambda _copy: 1.0, selection=ALL, commit_interval_s=0.02) as runner:
        runner.offer("x")
        while sum(path == "/commit" for path, _ in stack.gateway.posted) < 2:
            time.sleep(0.01)
        while not runner.counts.failed:
            time.sleep(0.01)
        assert "stream: TrinitySink does not record" in (runner.last_error or "")
        runner._make_agent = lambda _copy: str
        runner.offer("x")
    assert feedback(stack) == []
    assert (runner.last_error or "").startswith("the agent made no call to the model")


def test_trinity_run_records_answers_of_another_client() -> None:
    stack = RecordingGatewayStack()
    run = TrinitySink(stack).run(stack.async_client(), "t", 0)
    assert isinstance(run, TrinityRun)
    run.note("elsewhere-1")
    assert run._response_ids == ["elsewhere-1"]


@pytest.mark.parametrize("wrong", [{"repeat": 0}, {"at_once": 0}, {"waiting_max": 0}, {"run_timeout_s": 0.0}])
def test_invalid_numbers_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        TrainingRunner(HeadraceSink(RecordingGatewayStack()), answering, by_answer, **wrong)
    with pytest.raises(UsageError, match="model"):
        HeadraceSink("http://127.0.0.1:8000")
