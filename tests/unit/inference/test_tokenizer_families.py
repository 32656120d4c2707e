"""Each family of tokenizers: forced calls, schemas, streams and exact echoes hold, or forms are refused by name.

`HEADRACE_TOKENIZER_FOLDERS` names folders with other tokenizers, separated as paths are; their weights are not read.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.reasoning import THINK
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.tool_calls import HERMES
from headrace_inference.grammar.compiler import GrammarCompiler
from headrace_inference.grammar.settings import GrammarSettings
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_inference.writing.program import _manifest
from headrace_runtime.grammars.token_bytes import read_token_bytes
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from tests.support import tiny_model
from tests.support.tokenizer_families import FAMILIES, Family
from tests.unit.inference.asking import Json, joined
from tests.unit.inference.scripted import client

PLACES = ["Paris", "New  York", 'a "b" {c}\n', "Zürich 😀"]
SCHEMA = {
    "type": "object",
    "properties": {"place": {"enum": PLACES}, "days": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["place", "days"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
HELD = [family for family in FAMILIES if family.holds]
FOLDERS = [Path(name) for name in os.environ.get("HEADRACE_TOKENIZER_FOLDERS", "").split(os.pathsep) if name]
TEXTS = ("plain", " two  spaces ", "naïve 😀 \n\tend", '{"a": [1, "x y"]}', "ends in a space ", "\n")


class Served:
    """A tiny model with one of the tokenizers behind the HTTP interface."""

    def __init__(self, http: httpx.AsyncClient, version: str, tokenizer: ChatTokenizer) -> None:
        self.http = http
        self.version = version
        self.tokenizer = tokenizer

    async def ask(self, messages: list[Json], **fields: Any) -> Json:
        body = {"model": self.version, "messages": messages, "return_token_ids": True, "max_tokens": 500, **fields}
        answer = await self.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        if not fields.get("stream"):
            parsed: Json = answer.json()
            return parsed
        chunks = [json.loads(line[6:]) for line in answer.text.split("\n\n")[:-2]]
        return joined(chunks)


@pytest.fixture(params=[*HELD, *FOLDERS], ids=lambda param: getattr(param, "name", str(param)))
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    source = request.param
    folder = source.build(tmp_path / "base") if isinstance(source, Family) else _resized(source, tmp_path / "base")
    blobs = BlobStore((tmp_path / "blobs").as_uri())
    manifest = versions.read_manifest(blobs, tiny_model.publish(blobs, folder).manifest)
    engine = TorchEngine(TorchSettings.model_validate({"device": "cpu", "trace": False}))
    await engine.load(folder, manifest)
    tokenizer = ChatTokenizer(folder, manifest)
    async with client(engine, tokenizer, version=manifest.version) as http:
        yield Served(http, manifest.version, tokenizer)
    await engine.stop()


def _resized(source: Path, folder: Path) -> Path:
    """Create a tiny model for a foreign tokenizer."""
    content = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    Family(source.name, lambda: content).build(folder)
    shutil.copyfile(source / "tokenizer.json", folder / "tokenizer.json")
    return folder


async def test_forms_streams_and_echoes_hold(served: Served) -> None:
    user = {"role": "user", "content": "Weather in Zürich 😀?"}
    for seed in range(4):
        fixed: Json = {"seed": seed, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
        response = await served.ask([user], **fixed)
        choice = response["choices"][0]
        message = choice["message"]
        (call,) = message["tool_calls"]
        arguments = json.loads(call["function"]["arguments"])
        assert (call["function"]["name"], arguments["place"] in PLACES) == ("weather", True), message
        assert 0 <= arguments["days"] <= 99
        streamed = await served.ask([user], **fixed, stream=True)
        assert streamed["token_ids"] == choice["token_ids"]
        assert [part["function"] for part in streamed["tool_calls"]] == [call["function"]]
        assert (streamed["content"] or None) == message["content"]
        result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
        following = await served.ask([user, message, result], tools=[TOOL], max_tokens=4)
        conversation_ids = response["prompt_token_ids"] + choice["token_ids"]
        assert following["prompt_token_ids"][: len(conversation_ids)] == conversation_ids

        form = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
        constrained = await served.ask([user], seed=seed, response_format=form)
        value = json.loads(constrained["choices"][0]["message"]["content"])
        assert value["place"] in PLACES
        free = await served.ask([user], seed=seed, max_tokens=40)
        stream = await served.ask([user], seed=seed, max_tokens=40, stream=True)
        assert stream["content"] == free["choices"][0]["message"]["content"]
        after = await served.ask([user, free["choices"][0]["message"], user], max_tokens=2)
        conversation_ids = free["prompt_token_ids"] + free["choices"][0]["token_ids"]
        assert after["prompt_token_ids"][: len(conversation_ids)] == conversation_ids


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_tokenizer_holds_forms_or_the_check_names_the_cause(family: Family, tmp_path: Path) -> None:
    folder = family.build(tmp_path)
    tokenizer = ChatTokenizer(folder, _manifest(folder))
    compiler = GrammarCompiler(Parsers(HERMES, THINK), GrammarSettings())
    trouble = compiler.check(tokenizer, tokenizer.last_id + 1)
    compiler.close()
    assert bool(trouble) != family.holds, trouble
    assert family.holds or ("cannot be used with grammars" in trouble and "have no token" in trouble)


@pytest.mark.parametrize("family", HELD, ids=lambda family: family.name)
def test_the_bytes_of_tokens_make_up_the_text(family: Family, tmp_path: Path) -> None:
    folder = family.build(tmp_path)
    tokenizer = ChatTokenizer(folder, _manifest(folder))
    inner = tokenizer.outer.backend_tokenizer
    read = read_token_bytes(inner, tokenizer.last_id + 1)
    assert not read.unlike
    assert all(data is not None for data in read.data)
    prefix_length = len(tokenizer.encode("a"))
    for text in TEXTS:
        ids = tokenizer.encode(f"a{text}")
        data = b"".join(read.data[token] or b"" for token in ids).removeprefix(b" ")
        assert data == f"a{text}".encode(), (prefix_length, text)
        assert tokenizer.text_of(ids).removeprefix(" ") == f"a{text}"
