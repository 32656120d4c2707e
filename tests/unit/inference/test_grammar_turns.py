"""A grammar that takes long ends alone: others are compiled, and tenants take turns."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.reasoning import THINK
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.tool_calls import HERMES
from headrace_inference.errors import Overloaded
from headrace_inference.grammar import compiler
from headrace_inference.grammar.compiler import GrammarCompiler
from headrace_inference.grammar.settings import GrammarSettings
from headrace_inference.grammar.turns import Turns
from headrace_runtime.errors import Refused
from headrace_runtime.grammars.guides import GrammarGuide
from headrace_runtime.grammars.trial import GrammarTrial, TrialFailed
from tests.unit.inference.asking import Json
from tests.unit.inference.test_grammars import compile_form, json_form


async def test_a_slow_grammar_is_given_up_and_the_loop_goes_on(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT_S", 0.1)
    monkeypatch.setattr(compiler, "WAITING_MAX", 1)
    grammars = GrammarCompiler(Parsers(HERMES, THINK), GrammarSettings())
    go_on = threading.Event()
    compiled = grammars._guide

    def slow(grammar: Any) -> GrammarGuide:
        go_on.wait(20)
        return compiled(grammar)

    monkeypatch.setattr(grammars, "_guide", slow)
    monkeypatch.setattr(grammars, "_try", lambda _grammar: None)
    first = asyncio.create_task(compile_form(grammars, tokenizer, json_form()))
    await asyncio.sleep(0.05)
    second = asyncio.create_task(compile_form(grammars, tokenizer, json_form({"const": 2})))
    await asyncio.sleep(0.01)
    with pytest.raises(Refused, match="wait to be compiled") as overloaded:
        await compile_form(grammars, tokenizer, json_form({"const": 3}))
    assert overloaded.value.status == 503
    with pytest.raises(Refused, match=r"longer than 0\.1 s"):
        await first
    assert not second.done(), "it waits for a thread, which is not its fault"
    go_on.set()
    assert (await second).record.text
    grammars.close()


async def test_equal_grammars_of_a_tenant_share_one_compilation(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    grammars = GrammarCompiler(Parsers(HERMES, THINK), GrammarSettings())
    trials: list[str] = []
    monkeypatch.setattr(grammars, "_try", lambda grammar: trials.append(grammar.text))
    requests = [asyncio.create_task(compile_form(grammars, tokenizer, json_form())) for _ in range(100)]
    requests.append(asyncio.create_task(compile_form(grammars, tokenizer, json_form(), tenant="another")))
    await asyncio.sleep(0)
    requests.pop(0).cancel()
    answers = await asyncio.gather(*requests)
    assert len({compiled.record.text for compiled in answers}) == 1
    assert len(trials) == 2, "each tenant has compilations of its own"
    assert not grammars._compilations
    grammars.close()


SLOW_FACTORS: list[Json] = [{"type": "integer", "multipleOf": factor} for factor in (9973, 9967)]
"""The library takes minutes to compile these together, and counts none of it as fuel."""


async def test_a_schema_that_takes_too_long_holds_no_thread(
    tokenizer: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "COMPILE_TIMEOUT_S", 3.0)
    grammars = GrammarCompiler(Parsers(HERMES, THINK), GrammarSettings())
    slow = asyncio.create_task(compile_form(grammars, tokenizer, json_form({"allOf": SLOW_FACTORS}), tenant="greedy"))
    await asyncio.sleep(0.05)
    other_calls = [
        asyncio.create_task(compile_form(grammars, tokenizer, json_form({"const": number}), tenant=tenant))
        for number, tenant in enumerate(("greedy", "greedy", "modest"))
    ]
    with pytest.raises(Refused, match="takes longer than 3 s to compile"):
        await slow
    assert all([(await task).record.text for task in other_calls])
    grammars.close()


def test_a_trial_that_ends_its_process_fails_and_the_next_one_succeeds() -> None:
    trial = GrammarTrial()
    trial.run('start: "a"', 20.0)
    killing = threading.Timer(0.3, trial._running().kill)
    killing.start()
    with pytest.raises(TrialFailed):
        trial.run(f"start: %json {json.dumps({'allOf': SLOW_FACTORS})}", 20.0)
    killing.join()
    trial.run("not a grammar \0", 20.0)
    trial.run('start: "a"', 20.0)
    trial.stop()


async def test_owners_take_turns() -> None:
    turns: Turns[str] = Turns(places=1, waiting_max=6)
    order: list[str] = []

    async def work(owner: str) -> None:
        await turns.take(owner)
        order.append(owner)
        await asyncio.sleep(0)
        turns.give_back()

    greedy = [asyncio.create_task(work("greedy")) for _ in range(5)]
    await asyncio.sleep(0)
    cancelled = asyncio.create_task(work("gone"))
    modest = [asyncio.create_task(work("modest")) for _ in range(2)]
    await asyncio.sleep(0)
    cancelled.cancel()
    refused = [asyncio.create_task(work("greedy")) for _ in range(2)]
    await asyncio.gather(*greedy, *modest)
    assert order == ["greedy", "greedy", "greedy", "modest", "greedy", "modest", "greedy"]
    for task in refused:
        with pytest.raises(Overloaded):
            await task
    assert (turns._free, dict(turns._lines)) == (1, {})
