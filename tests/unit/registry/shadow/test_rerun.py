"""A prompt answered anew: what of the user's session can be repeated, which tools may be called, and how it ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace_registry.shadow import recording
from headrace_registry.shadow.recording import Recording, canonical, first_run, is_whole, log_weight, weighed
from headrace_registry.shadow.rerun import Answered, Rerun, RerunBounds, RerunFailed, Toolbox, rerun
from headrace_registry.shadow.settings import ShadowSettings
from headrace_registry.shadow.tool_program import ToolProgram
from headrace_schemas import FunctionCall, Message, Sampling, ToolCall, Turn
from tests.support.turns import ask, user

BOUNDS = RerunBounds(steps_max=4, tokens_max=1000)


def calls(*wanted: tuple[str, str]) -> Message:
    made = tuple(
        ToolCall(id=f"c{number}", function=FunctionCall(name=name, arguments=arguments))
        for number, (name, arguments) in enumerate(wanted)
    )
    return Message(role="assistant", tool_calls=made)


def result(text: str, number: int = 0) -> Message:
    return Message(role="tool", content=text, tool_call_id=f"c{number}")


def says(text: str) -> Message:
    return Message(role="assistant", content=text)


def answered(messages: Sequence[Message], answer: Message, **fields: object) -> Turn:
    made = ask(messages, answer.text, **fields)  # type: ignore[arg-type]
    return made.model_copy(update={"choices": (made.choices[0].model_copy(update={"message": answer}),)})


ASKED = (user("who won?"),)
SEARCHED = calls(("search", '{"q": "final", "n": 1}'))
SESSION = (
    answered(ASKED, SEARCHED),
    answered((*ASKED, SEARCHED, result("Ada")), says("Ada")),
    answered((*ASKED, SEARCHED, result("Ada"), says("Ada"), user("sure?")), says("yes")),
)


def test_the_first_run_ends_with_the_first_answer_that_calls_no_tool() -> None:
    assert first_run(SESSION) == SESSION[:2]
    assert not is_whole(SESSION), "the user went on"
    assert is_whole(SESSION[:2])
    assert first_run(SESSION[1:]) == (), "its opening was never seen"
    assert first_run(SESSION[:1]) == SESSION[:1]
    other = answered((user("another chat"),), says("hi"))
    assert first_run((SESSION[0], other)) == SESSION[:1], "what does not go on from it is another run"


def test_equal_calls_get_recorded_results_in_turn_and_the_last_one_again() -> None:
    twice = calls(("roll", "{}"), ("roll", "{ }"), ("search", "not json"))
    messages = (*ASKED, twice, result("4", 0), result("2", 1), result("?", 2))
    found = Recording.of([answered(messages, says("done"))])
    rolled = [found.replay(FunctionCall(name="roll", arguments="{}")) for _ in range(4)]
    assert rolled == ["4", "2", "2", "2"]
    assert found.replay(FunctionCall(name="search", arguments="not json")) == "?"
    assert found.replay(FunctionCall(name="roll", arguments='{"n": 1}')) is None
    assert canonical('{"b": 1, "a": 2}') == canonical('{"a":2,"b":1}')


def test_the_weight_of_a_run_is_the_product_over_its_tokens() -> None:
    run = [one.model_copy(update={"choices": (_with(one, (-1.0, -2.0)),)}) for one in SESSION[:2]]
    answers = weighed(run)
    assert answers is not None
    assert [one.logprobs for one in answers] == [(-1.0, -2.0)] * 2
    assert log_weight(answers, [(-1.0, -1.0), (-3.0, -2.0)]) == pytest.approx(1.0 - 2.0)
    greedy = [one.model_copy(update={"sampling": Sampling(temperature=0.0)}) for one in run]
    assert weighed(greedy) is None, "what was not sampled has no weight"
    assert math.isclose(log_weight(answers, [one.logprobs for one in answers]), 0.0)


def _with(turn: Turn, logprobs: tuple[float, ...]) -> object:
    return turn.choices[0].model_copy(update={"token_ids": (7,) * len(logprobs), "logprobs": logprobs})


@dataclass
class Script:
    """A model that says what was written down, and what it was asked."""

    answers: list[Message]
    asked: list[Sequence[Message]] = field(default_factory=list)

    async def ask(self, version: str, prompt: Turn, messages: Sequence[Message]) -> Answered:
        self.asked.append(tuple(messages))
        return Answered(self.answers.pop(0), 100)


@dataclass
class Tools:
    """Whoever is really called."""

    called: list[str] = field(default_factory=list)

    async def call(self, function: FunctionCall) -> str:
        self.called.append(function.name)
        return f"{function.name} says so"


async def play(script: Script, tools: Tools, *read_only: str) -> Rerun:
    toolbox = Toolbox(read_only, tools, Recording.of(SESSION))
    return await rerun(script, toolbox, "m@0123456789ab", SESSION[0], BOUNDS)


async def test_recorded_results_are_replayed_and_read_only_tools_are_called() -> None:
    script, tools = Script([SEARCHED, calls(("today", "{}")), says("Bea")]), Tools()
    assert await play(script, tools, "today") == Rerun("answered", 300, 3)
    assert tools.called == ["today"]
    assert [one.text for one in script.asked[-1] if one.role == "tool"] == ["Ada", "today says so"]


async def test_what_was_never_asked_of_a_tool_that_may_write_ends_it() -> None:
    script, tools = Script([calls(("pay", '{"sum": 1000}')), says("paid")]), Tools()
    assert await play(script, tools, "today") == Rerun("other_call", 100, 1)
    assert tools.called == []
    assert len(script.asked) == 1


async def test_other_arguments_are_another_call() -> None:
    tools = Tools()
    assert (await play(Script([calls(("search", '{"q": "else"}'))]), tools)).ended == "other_call"
    assert tools.called == []


async def test_a_tool_that_is_let_through_by_mistake_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: an allow-list that holds everything. The record of calls is what the tests above look at."""

    class All(frozenset[str]):
        def __contains__(self, name: object) -> bool:
            return True

    tools = Tools()
    await play(Script([calls(("pay", "{}")), says("paid")]), tools)
    assert tools.called == []
    toolbox = Toolbox(All(), tools, Recording())
    await rerun(Script([calls(("pay", "{}")), says("paid")]), toolbox, "m@0123456789ab", SESSION[0], BOUNDS)
    assert tools.called == ["pay"]


async def test_a_program_is_never_told_the_name_of_a_tool_that_may_write(tmp_path: Path) -> None:
    """The second door, where the first one was left open."""
    told = tmp_path / "told"
    source = f"""
import json, sys
for line in sys.stdin:
    open({str(told)!r}, "a").write(line)
    asked = json.loads(line)
    print(json.dumps({{"id": asked["id"], "result": asked["name"] + " says " + asked["arguments"]}}), flush=True)
"""
    (tmp_path / "tools.py").write_text(source)
    program = ToolProgram(_settings(tmp_path))
    try:
        assert await program.call(FunctionCall(name="today", arguments="{}")) == "today says {}"
        with pytest.raises(AssertionError, match="pay is not marked read-only"):
            await program.call(FunctionCall(name="pay", arguments="{}"))
        assert "pay" not in told.read_text()
    finally:
        await program.stop()


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import sys; sys.exit(3)", "has ended"),
        ("import sys; sys.stdin.readline(); print('oops', flush=True)", "not"),
        ("import sys; sys.stdin.readline(); print('x' * 5000, flush=True)", "longer"),
        ("import sys\nwhile sys.stdin.readline():\n    pass", "nothing within"),
    ],
)
async def test_a_program_that_does_not_answer_fails_the_call_and_is_started_again(
    tmp_path: Path, source: str, reason: str
) -> None:
    (tmp_path / "tools.py").write_text(source)
    program = ToolProgram(_settings(tmp_path, tool_timeout_s=0.5 if reason == "nothing within" else 30))
    try:
        for _ in range(2):
            with pytest.raises(RerunFailed, match=reason):
                await program.call(FunctionCall(name="today", arguments="{}"))
    finally:
        await program.stop()


def _settings(folder: Path, **more: object) -> ShadowSettings:
    command = ("{python}", str(folder / "tools.py"))
    fields = {"read_only_tools": ("today",), "tools_command": command, "tool_result_bytes_max": 1024, **more}
    return ShadowSettings.model_validate(fields)


async def test_a_model_that_calls_and_calls_comes_to_a_bound() -> None:
    tools = Tools()
    assert await play(Script([SEARCHED] * 9), tools) == Rerun("steps", 400, 4)
    toolbox = Toolbox((), tools, Recording.of(SESSION))
    few = RerunBounds(steps_max=4, tokens_max=150)
    assert await rerun(Script([SEARCHED] * 9), toolbox, "m@0123456789ab", SESSION[0], few) == Rerun("tokens", 200, 2)


def test_settings_that_nobody_could_mean_are_refused() -> None:
    with pytest.raises(ValueError, match="tools_command is empty"):
        ShadowSettings(read_only_tools=("search",))
    with pytest.raises(ValueError, match="name each once"):
        ShadowSettings.model_validate({"tenants": [{"tenant": "a"}, {"tenant": "a"}]})


def test_the_opening_has_no_answer_in_it() -> None:
    assert recording.is_opening(SESSION[0])
    assert not recording.is_opening(SESSION[1])
