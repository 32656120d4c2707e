"""Tests of one contract for all engines: `torch`, `vllm` with the real package if installed, and `vllm` with the
stand-in.

Other tests use the stand-in. The parts of the package that we use are also tested without a started engine. `make check
NAME=vllm` runs these tests in an environment with the package and reports the figures of each promise.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace_inference.chat.answer import AnswerParser, AnswerSyntax
from headrace_inference.chat.parsers import REASONING_PARSERS, TOOL_PARSERS, ParserContext, Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.engine import Engine, Sampling, Start
from headrace_inference.errors import EngineFailed, NoRoom, VersionUnusable
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_inference.vllm_engine import library
from headrace_inference.vllm_engine.core import Request
from headrace_inference.vllm_engine.engine import VllmEngine
from headrace_inference.vllm_engine.library import VllmLibrary
from headrace_inference.vllm_engine.settings import VllmSettings
from headrace_runtime.registries import PluginError
from headrace_schemas import Tool
from tests.contract.engine.ground import (
    CONTEXT,
    RANK_MAX,
    SEQUENCES_MAX,
    WAITING_MAX,
    Ground,
    Versions,
    build,
    prompt_of,
)
from tests.contract.engine.planted import FAULTS, Fault
from tests.contract.engine.promises import PROMISES, Promise, beyond, renamed
from tests.contract.engine.stand_in import StandIn
from tests.support import presence

on_one_loop = pytest.mark.asyncio(loop_scope="session")
START_S = 900
"""An engine core takes a minute to start on two quiet cores, and ten on two that nine others share."""
VLLM = VllmSettings(
    dtype="float32",
    sequences_max=SEQUENCES_MAX,
    waiting_max=WAITING_MAX,
    context_tokens_max=CONTEXT,
    adapters_max=4,
    adapter_rank_max=RANK_MAX,
    batch_tokens_max=64,
)
TORCH = TorchSettings(
    device="cpu",
    sequences_max=SEQUENCES_MAX,
    waiting_max=WAITING_MAX,
    context_tokens_max=CONTEXT,
    prefill_tokens_max=64,
)


@pytest.fixture(scope="session")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    return build(tmp_path_factory.mktemp("engines"))


async def with_everything(engine: Engine, versions: Versions, tokens: int) -> Ground:
    for of in versions.all:
        await engine.load(of.folder, of.manifest)
    return Ground(engine, versions, tokens)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def torch_ground(versions: Versions) -> AsyncIterator[Ground]:
    engine = TorchEngine(TORCH)
    yield await with_everything(engine, versions, 1000)
    await engine.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stand_in_ground(versions: Versions) -> AsyncIterator[Ground]:
    engine = VllmEngine(VLLM, StandIn(VLLM))
    yield await with_everything(engine, versions, 200)
    await engine.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_ground(versions: Versions) -> AsyncIterator[Ground]:
    presence.need("vllm")
    from headrace_inference.vllm_engine.library import VllmLibrary

    engine = VllmEngine(VLLM, VllmLibrary(VLLM))
    yield await with_everything(engine, versions, 5000)
    await engine.stop()


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@on_one_loop
async def test_torch(promise: Promise, torch_ground: Ground, tmp_path: Path) -> None:
    await promise(torch_ground, tmp_path)


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@on_one_loop
async def test_the_stand_in(promise: Promise, stand_in_ground: Ground, tmp_path: Path) -> None:
    await promise(stand_in_ground, tmp_path)


@pytest.mark.timeout(START_S)
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@on_one_loop
async def test_vllm(
    promise: Promise, vllm_ground: Ground, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    for name, value in (await promise(vllm_ground, tmp_path) or {}).items():
        record_property(name, value)


@pytest.mark.timeout(START_S)
@on_one_loop
async def test_vllm_has_bounds_of_its_own(vllm_ground: Ground, tmp_path: Path) -> None:
    await bounds_of_its_own(vllm_ground, tmp_path)


@on_one_loop
async def test_the_stand_in_has_the_same_bounds(stand_in_ground: Ground, tmp_path: Path) -> None:
    await bounds_of_its_own(stand_in_ground, tmp_path)


async def bounds_of_its_own(ground: Ground, folder: Path) -> None:
    """A rank, a number of adapters or a number of complete versions above its limit is refused with the setting's
    name."""
    engine, of = ground.engine, ground.versions.other
    wide = renamed(of, step=400)
    with pytest.raises(VersionUnusable, match=f"has rank {2 * RANK_MAX}, inference.vllm.adapter_rank_max allows"):
        await engine.load(beyond(of, folder / "wide"), wide.manifest)
    more = [renamed(of, step=500 + number) for number in range(3)]
    for generation in more[:2]:
        await engine.load(generation.folder, generation.manifest)
    with pytest.raises(NoRoom, match=r"inference\.vllm\.adapters_max allows 4"):
        await engine.load(more[2].folder, more[2].manifest)
    full = renamed(ground.versions.second, step=600)
    with pytest.raises(NoRoom, match=r"inference\.vllm\.cores_max allows 2"):
        await engine.load(full.folder, full.manifest)
    await engine.unload(more[0].version)
    await engine.load(more[2].folder, more[2].manifest)
    for generation in more[1:]:
        assert (await engine.probe(generation.version)).passed
        await engine.unload(generation.version)
    for loaded in ground.versions.all:
        assert len((await ground.sample(prompt_of(9), loaded)).token_ids) == 16


@pytest.mark.timeout(START_S)
@on_one_loop
async def test_vllm_without_a_core_is_not_alive(vllm_ground: Ground) -> None:
    """This test must be the last with its engine, because it kills the engine's process during an answer."""
    engine = vllm_ground.engine
    assert isinstance(engine, VllmEngine)
    core = engine._cores[vllm_ground.versions.first.version]
    streams = [
        asyncio.create_task(vllm_ground.sample(prompt_of(9), of, stream=True, max_tokens=400))
        for of in (vllm_ground.versions.first, vllm_ground.versions.adapter)
    ]
    await asyncio.sleep(0.3)
    llm: Any = core.llm
    for process in llm.engine_core.resources.engine_manager.processes:
        os.kill(process.pid, 9)
    async with asyncio.timeout(30):
        while engine.alive:  # noqa: ASYNC110 (vLLM has no event for it)
            await asyncio.sleep(0.05)
    with pytest.raises(EngineFailed, match="must be restarted"):
        engine.check()
    for stream in streams:
        with pytest.raises(EngineFailed):
            await asyncio.wait_for(stream, 30)
    with pytest.raises(EngineFailed, match="must be restarted"):
        engine.generate(
            prompt_of(9), Sampling(max_tokens=4), vllm_ground.versions.second.version, [Start()], stream=True
        )


@pytest.mark.parametrize(("name", "fault", "promise"), FAULTS, ids=[name for name, *_ in FAULTS])
@on_one_loop
async def test_a_planted_fault_is_found(
    name: str,
    fault: Fault,
    promise: Promise,
    versions: Versions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault(monkeypatch)
    engine = VllmEngine(VLLM, StandIn(VLLM))
    ground = await with_everything(engine, versions, 60)
    with pytest.raises((AssertionError, EngineFailed, pytest.fail.Exception, BaseExceptionGroup)):
        await asyncio.wait_for(promise(ground, tmp_path), 60)
    monkeypatch.undo()
    await engine.stop()


def test_each_promise_is_seen_to_fail() -> None:
    assert {promise for _, _, promise in FAULTS} == set(PROMISES)


@pytest.mark.parametrize("kind", [TorchEngine, VllmEngine])
def test_an_engine_has_every_member_of_the_protocol(kind: type[Any]) -> None:
    members = {name: member for name, member in vars(Engine).items() if inspect.isfunction(member)}
    assert len(members) > 8
    for name, member in members.items():
        if name.startswith("_"):
            continue
        assert list(inspect.signature(getattr(kind, name)).parameters) == list(inspect.signature(member).parameters)


ONE = '<tool_call>{"name": "search", "arguments": {"query": "a  b", "limit": 3}}</tool_call>'
TWO = '<tool_call>\n{"name": "read", "arguments": {"id": 7}}\n</tool_call>'
ANSWERS = {
    "text alone": "Nothing to do here.",
    "a call": f"I look. {ONE}",
    "two calls": f"{ONE}\n{TWO}",
    "half a call": 'Well <tool_call>{"name": "sea',
    "no call": "1 < 2 and <tool is no tag",
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    presence.need("vllm")
    first = build(tmp_path_factory.mktemp("parsers")).first
    return ChatTokenizer(first.folder, first.manifest)


def read(tokenizer: ChatTokenizer, parsers: Parsers, text: str) -> tuple[str, str, list[tuple[str, object]]]:
    tools = [
        Tool.model_validate({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
        for name in ("search", "read")
    ]
    answer = AnswerParser(
        tokenizer,
        AnswerSyntax.of("", parsers, tools=True, context=ParserContext(tokenizer.transformers_tokenizer, tools)),
    )
    answer.feed([*tokenizer.encode(text), tokenizer.eos_id or 0])
    answer.end()
    complete_answer = answer.total
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in complete_answer.calls]
    return complete_answer.reasoning.strip(), complete_answer.content.strip(), calls


@pytest.mark.parametrize("text", ANSWERS.values(), ids=ANSWERS)
def test_vllm_hermes_finds_what_ours_finds(tokenizer: ChatTokenizer, text: str) -> None:
    vllm_parsers = Parsers(TOOL_PARSERS.get("vllm:hermes"))
    vllm_parsers.check()
    assert read(tokenizer, vllm_parsers, text) == read(tokenizer, Parsers(TOOL_PARSERS.get("hermes")), text)


def test_vllm_reasoning_is_taken_off_the_front(tokenizer: ChatTokenizer) -> None:
    vllm_parsers = Parsers(TOOL_PARSERS.get("vllm:hermes"), REASONING_PARSERS.get("vllm:deepseek_r1"))
    vllm_parsers.check()
    message = read(tokenizer, vllm_parsers, f"<think>let me look</think>I look. {ONE}")
    assert message == ("let me look", "I look.", [("search", {"query": "a  b", "limit": 3})])


@pytest.mark.parametrize("registry", [TOOL_PARSERS, REASONING_PARSERS], ids=["tools", "reasoning"])
def test_vllm_parsers_that_are_not_there_are_named_with_those_that_are(registry: Any) -> None:
    presence.need("vllm")
    parser = registry.get("vllm:no_such_parser")
    with pytest.raises(PluginError, match=r"has no .* parser 'no_such_parser'; there are .*deepseek_r1|hermes"):
        parser.check()


def test_vllm_takes_what_a_choice_asks_for() -> None:
    presence.need("vllm")
    library = VllmLibrary(VllmSettings())
    request = Request(
        max_tokens=7, delta=True, temperature=0.7, seed=3, stop_token_ids=(5,), logprobs=2, logit_bias={4: -1.5}
    )
    parameters: Any = library.parameters(request)
    assert (parameters.max_tokens, parameters.temperature, parameters.seed, parameters.logprobs) == (7, 0.7, 3, 2)
    assert (parameters.stop_token_ids, parameters.logit_bias, parameters.ignore_eos, parameters.detokenize) == (
        [5],
        {4: -1.5},
        True,
        False,
    )
    assert parameters.output_kind.name == "DELTA"
    probe: Any = library.parameters(Request(max_tokens=1, delta=False, logprobs=1, logprob_token_ids=(9,)))
    assert (probe.logprob_token_ids, probe.num_logprobs, probe.output_kind.name) == ([9], 1, "FINAL_ONLY")


def test_vllm_takes_an_adapter_under_a_number(tmp_path: Path) -> None:
    presence.need("vllm")
    adapter: Any = VllmLibrary(VllmSettings()).adapter("tiny@0123456789abcdef", 4, tmp_path)
    assert (adapter.lora_name, adapter.lora_int_id, adapter.lora_path) == ("tiny@0123456789abcdef", 4, str(tmp_path))
    assert not adapter.load_inplace, "it would be read again and again"


@pytest.mark.parametrize("cpu", [True, False])
def test_vllm_knows_every_argument(
    tokenizer: ChatTokenizer, tmp_path_factory: pytest.TempPathFactory, cpu: bool
) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    folder = build(tmp_path_factory.mktemp("arguments")).first.folder
    arguments = library.arguments(VllmSettings(adapter_rank_max=9), folder, cpu=cpu)
    assert arguments.keys() <= {field.name for field in fields(AsyncEngineArgs)}
