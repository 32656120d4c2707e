"""Tests of the rerun of a recorded prompt: the repeatable part of the session, the permitted tools, and the end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import pytest

from headrace_registry.rollouts.settings import RerunBounds, ShadowSettings
from headrace_registry.shadow import gateway_client
from headrace_registry.shadow import rerun as recording
from headrace_registry.shadow.gateway_client import ToolProgram
from headrace_registry.shadow.rerun import (
    ModelAnswer,
    Recording,
    Rerun,
    RerunFailed,
    Toolbox,
    canonical_arguments,
    first_run,
    is_single_run,
    log_weight,
    rerun,
    scorable_answers,
)
from headrace_schemas import FunctionCall, Message, Sampling, ToolCall, Turn
from tests.support.turns import ask, user

BOUNDS = RerunBounds(steps_max=4, tokens_max=1000)


def calls(*functions: tuple[str, str]) -> Message:
    tool_calls = tuple(
        ToolCall(id=f"c{number}", function=FunctionCall(name=name, arguments=arguments))
        for number, (name, arguments) in enumerate(functions)
    )
    return Message(role="assistant", tool_calls=tool_calls)


def result(text: str, number: int = 0) -> Message:
    return Message(role="tool", content=text, tool_call_id=f"c{number}")


def assistant_message(text: str) -> Message:
    return Message(role="assistant", content=text)


def answered(messages: Sequence[Message], answer: Message, **fields: object) -> Turn:
    turn = ask(messages, answer.text, **fields)  # type: ignore[arg-type]
    return turn.model_copy(update={"choices": (turn.choices[0].model_copy(update={"message": answer}),)})


ASKED = (user("who won?"),)
SEARCHED = calls(("search", '{"q": "final", "n": 1}'))
SESSION = (
    answered(ASKED, SEARCHED),
    answered((*ASKED, SEARCHED, result("Ada")), assistant_message("Ada")),
    answered((*ASKED, SEARCHED, result("Ada"), assistant_message("Ada"), user("sure?")), assistant_message("yes")),
)


def test_first_run_ends_with_the_first_answer_without_a_tool_call() -> None:
    assert first_run(SESSION) == SESSION[:2]
    assert not is_single_run(SESSION), "the user went on"
    assert is_single_run(SESSION[:2])
    assert first_run(SESSION[1:]) == (), "its opening was never seen"
    assert first_run(SESSION[:1]) == SESSION[:1]
    other = answered((user("another chat"),), assistant_message("hi"))
    assert first_run((SESSION[0], other)) == SESSION[:1], "what does not go on from it is another run"


def test_recording_replays_results_in_order_and_repeats_the_last() -> None:
    twice = calls(("roll", "{}"), ("roll", "{ }"), ("search", "not json"))
    messages = (*ASKED, twice, result("4", 0), result("2", 1), result("?", 2))
    recording = Recording.of([answered(messages, assistant_message("done"))])
    rolled = [recording.replay(FunctionCall(name="roll", arguments="{}")) for _ in range(4)]
    assert rolled == ["4", "2", "2", "2"]
    assert recording.replay(FunctionCall(name="search", arguments="not json")) == "?"
    assert recording.replay(FunctionCall(name="roll", arguments='{"n": 1}')) is None
    assert canonical_arguments('{"b": 1, "a": 2}') == canonical_arguments('{"a":2,"b":1}')


def test_log_weight_is_the_sum_over_tokens() -> None:
    run = [turn.model_copy(update={"choices": (_with(turn, (-1.0, -2.0)),)}) for turn in SESSION[:2]]
    answers = scorable_answers(run)
    assert answers is not None
    assert [answer.logprobs for answer in answers] == [(-1.0, -2.0)] * 2
    assert log_weight(answers, [(-1.0, -1.0), (-3.0, -2.0)]) == pytest.approx(1.0 - 2.0)
    greedy = [run_turn.model_copy(update={"sampling": Sampling(temperature=0.0)}) for run_turn in run]
    assert scorable_answers(greedy) is None, "what was not sampled has no weight"
    assert math.isclose(log_weight(answers, [answer.logprobs for answer in answers]), 0.0)


def _with(turn: Turn, logprobs: tuple[float, ...]) -> object:
    return turn.choices[0].model_copy(update={"token_ids": (7,) * len(logprobs), "logprobs": logprobs})


@dataclass
class Script:
    """Model with prepared answers that records its requests."""

    answers: list[Message]
    requests: list[Sequence[Message]] = field(default_factory=list)

    async def call_model(self, version: str, prompt: Turn, messages: Sequence[Message]) -> ModelAnswer:
        self.requests.append(tuple(messages))
        return ModelAnswer(self.answers.pop(0), 100)


@dataclass
class Tools:
    """Tools that record their calls."""

    called: list[str] = field(default_factory=list)

    async def call(self, function: FunctionCall) -> str:
        self.called.append(function.name)
        return f"{function.name} says so"


async def play(script: Script, tools: Tools, *read_only: str) -> Rerun:
    toolbox = Toolbox(read_only, tools, Recording.of(SESSION))
    return await rerun(script, toolbox, "m@0123456789ab", SESSION[0], BOUNDS)


async def test_rerun_replays_results_and_calls_read_only_tools() -> None:
    script, tools = Script([SEARCHED, calls(("today", "{}")), assistant_message("Bea")]), Tools()
    assert await play(script, tools, "today") == Rerun("answered", 300, 3)
    assert tools.called == ["today"]
    assert [message.text for message in script.requests[-1] if message.role == "tool"] == ["Ada", "today says so"]


async def test_rerun_ends_at_an_unrecorded_call_of_a_writing_tool() -> None:
    script, tools = Script([calls(("pay", '{"sum": 1000}')), assistant_message("paid")]), Tools()
    assert await play(script, tools, "today") == Rerun("other_call", 100, 1)
    assert tools.called == []
    assert len(script.requests) == 1


async def test_rerun_ends_at_a_call_with_other_arguments() -> None:
    tools = Tools()
    assert (await play(Script([calls(("search", '{"q": "else"}'))]), tools)).ended == "other_call"
    assert tools.called == []


async def test_tool_program_rejects_tools_that_are_not_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Injected fault: an allow-list with every tool. The tests above check the same record of calls."""

    class All(frozenset[str]):
        def __contains__(self, name: object) -> bool:
            return True

    tools = Tools()
    await play(Script([calls(("pay", "{}")), assistant_message("paid")]), tools)
    assert tools.called == []
    toolbox = Toolbox(All(), tools, Recording())
    await rerun(
        Script([calls(("pay", "{}")), assistant_message("paid")]), toolbox, "m@0123456789ab", SESSION[0], BOUNDS
    )
    assert tools.called == ["pay"]


async def test_tool_program_never_receives_calls_of_writing_tools(tmp_path: Path) -> None:
    """The tool program checks each call again, in case the first check let it pass."""
    log_file = tmp_path / "told"
    source = f"""
import json, sys
for line in sys.stdin:
    open({str(log_file)!r}, "a").write(line)
    asked = json.loads(line)
    print(json.dumps({{"id": asked["id"], "result": asked["name"] + " says " + asked["arguments"]}}), flush=True)
"""
    (tmp_path / "tools.py").write_text(source)
    program = ToolProgram(_settings(tmp_path))
    try:
        assert await program.call(FunctionCall(name="today", arguments="{}")) == "today says {}"
        with pytest.raises(AssertionError, match="pay is not marked read-only"):
            await program.call(FunctionCall(name="pay", arguments="{}"))
        assert "pay" not in log_file.read_text()
    finally:
        await program.stop()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import sys; sys.exit(3)", "has ended"),
        ("import sys; sys.stdin.readline(); print('oops', flush=True)", "not"),
        ("import sys; sys.stdin.readline(); print('x' * 5000, flush=True)", "longer"),
        ("import sys\nwhile sys.stdin.readline():\n    pass", "no result within"),
    ],
)
async def test_tool_program_restarts_after_a_failed_call(
    tmp_path: Path, source: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tools.py").write_text(source)
    monkeypatch.setattr(
        "headrace_registry.shadow.gateway_client.TOOL_TIMEOUT_S", 0.5 if reason == "no result within" else 30
    )
    monkeypatch.setattr("headrace_registry.shadow.gateway_client.TOOL_RESULT_BYTES_MAX", 1024)
    program = ToolProgram(_settings(tmp_path))
    try:
        for _ in range(2):
            with pytest.raises(RerunFailed, match=reason):
                await program.call(FunctionCall(name="today", arguments="{}"))
    finally:
        await program.stop()


def _settings(folder: Path, **more: object) -> ShadowSettings:
    command = ("{python}", str(folder / "tools.py"))
    fields = {"read_only_tools": ("today",), "tools_command": command, **more}
    return ShadowSettings.model_validate(fields)


async def test_rerun_stops_at_its_bounds() -> None:
    tools = Tools()
    assert await play(Script([SEARCHED] * 9), tools) == Rerun("steps", 400, 4)
    toolbox = Toolbox((), tools, Recording.of(SESSION))
    few = RerunBounds(steps_max=4, tokens_max=150)
    assert await rerun(Script([SEARCHED] * 9), toolbox, "m@0123456789ab", SESSION[0], few) == Rerun("tokens", 200, 2)


def test_shadow_settings_refuse_inconsistent_values() -> None:
    with pytest.raises(ValueError, match="tools_command is empty"):
        ShadowSettings(read_only_tools=("search",))
    with pytest.raises(ValueError, match="name each tenant once"):
        ShadowSettings.model_validate({"tenants": [{"tenant": "a"}, {"tenant": "a"}]})


def test_is_opening_is_false_after_an_answer() -> None:
    assert recording.is_opening(SESSION[0])
    assert not recording.is_opening(SESSION[1])


async def test_each_start_of_the_tool_program_logs_a_digest_of_its_code(tmp_path: Path) -> None:
    (tmp_path / "tools.py").write_text(
        "import helper, json, sys\nfor line in sys.stdin:\n"
        "    print(json.dumps({'id': json.loads(line)['id'], 'result': helper.RESULT}), flush=True)\n"
    )
    digests, program = [], ToolProgram(_settings(tmp_path))
    for result in ("a", "changed", "changed"):
        (tmp_path / "helper.py").write_text(f"RESULT = {result!r}\n")
        with mock.patch.object(gateway_client, "log") as log:
            assert await program.call(FunctionCall(name="today", arguments="{}")) == result
            await program.stop()
        log.info.assert_called_once()
        digests.append(log.info.call_args.kwargs["sha256"])
    assert digests[0] != digests[1] == digests[2]
