"""`POST /v1/chat/completions` refuses invalid requests with the name of the field, and continues to serve."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.errors import Overloaded
from headrace_runtime.storage.versions import file_digest
from tests.unit.inference.asking import TOOLS, USER, ask
from tests.unit.inference.conftest import Models
from tests.unit.inference.scripted import VERSION, ScriptedEngine, client

NAMED = {"type": "function", "function": {"name": "none_of_them"}}


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b"[]", 400, "invalid_value", None),
        (b"\xff\xfe", 400, "invalid_json", None),
        ({"messages": []}, 400, "invalid_value", "messages"),
        ({"messages": "hi"}, 400, "invalid_value", "messages"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, 400, "invalid_value", "messages.0.role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "invalid_value", None),
        ({"messages": [{"role": "user", "content": "x", "smell": 1}]}, 400, "unknown_field", "messages.0.smell"),
        ({"temperature": "hot"}, 400, "invalid_value", "temperature"),
        ({"temperature": 3}, 400, "invalid_value", "temperature"),
        ({"temperature": float("nan")}, 400, None, None),
        ({"top_p": 0}, 400, "invalid_value", "top_p"),
        ({"max_tokens": 0}, 400, "invalid_value", "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 400, "invalid_value", None),
        ({"n": 5}, 400, "invalid_value", "n"),
        ({"top_logprobs": 21, "logprobs": True}, 400, "invalid_value", "top_logprobs"),
        ({"top_logprobs": 2}, 400, "invalid_value", None),
        ({"logit_bias": {"5": 1}}, 400, "unknown_field", "logit_bias"),
        ({"tool_choice": "any", "tools": TOOLS}, 400, "invalid_value", "tool_choice"),
        ({"tool_choice": {"type": "custom"}, "tools": TOOLS}, 400, "invalid_value", "tool_choice"),
        ({"tool_choice": "required"}, 400, "invalid_value", "tool_choice"),
        ({"tool_choice": NAMED, "tools": TOOLS}, 400, "invalid_value", "tool_choice"),
        ({"response_format": {"type": "grammar"}}, 400, "invalid_value", "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, 400, "invalid_value", "response_format"),
        ({"response_format": {"type": "json_object"}, "ignore_eos": True}, 400, "invalid_value", None),
        ({"stream_options": {"include_usage": True}}, 400, "invalid_value", None),
        ({"stop": [""]}, 400, "invalid_value", "stop.0"),
        ({"model": "other@000000000000"}, 404, "model_not_found", "model"),
        ({"messages": [{"role": "user", "content": "x" * 30_000}]}, 413, "body_too_large", None),
    ],
)
async def test_each_is_refused_by_name(
    tokenizer: ChatTokenizer, body: Any, status: int, code: str | None, param: str | None
) -> None:
    engine = ScriptedEngine(tokenizer, "Hi.")
    data = body if isinstance(body, bytes) else json.dumps({"model": VERSION, "messages": USER, **body}).encode()
    async with client(engine, tokenizer) as http:
        response = await http.post("/v1/chat/completions", content=data)
        assert (await ask(http)).status_code == 200, "the next request is fine"
    assert response.status_code == status
    error = response.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert code is None or error["code"] == code
    assert param is None or error["param"].startswith(param)
    assert len(engine.asked) == 1


async def test_errors_do_not_repeat_what_the_user_wrote(tokenizer: ChatTokenizer) -> None:
    async with client(ScriptedEngine(tokenizer, "Hi."), tokenizer) as http:
        response = await ask(http, messages=[{"role": "user", "content": 7, "name": "SECRET" * 100}])
    assert "SECRET" not in response.text


async def test_an_overloaded_engine_says_when_to_come_back(tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, "Hi.")
    engine.refusal = Overloaded("full", retry_after_s=2)
    async with client(engine, tokenizer) as http:
        response = await ask(http)
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")
    assert response.json()["error"]["code"] == "overloaded"
    assert response.json()["error"]["type"] == "server_error"


async def test_a_broken_engine_is_a_500_or_an_error_in_the_stream(tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, "Hi there.")
    engine.fail_after = 0
    async with client(engine, tokenizer) as http:
        response = await ask(http)
        engine.fail_after = 2
        stream = await ask(http, stream=True)
    assert (response.status_code, response.json()["error"]["code"]) == (500, "engine_failed")
    *_, last, end = stream.text.split("\n\n")
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_failed"
    assert end == ""
    assert "[DONE]" not in stream.text
    assert engine.closed == 2


async def test_what_nobody_expected_tells_nothing_of_its_inside(tokenizer: ChatTokenizer) -> None:
    engine = ScriptedEngine(tokenizer, "Hi.")
    engine.refusal = RuntimeError("SECRET")
    async with client(engine, tokenizer) as http:
        response = await ask(http)
    assert response.status_code == 500
    assert "SECRET" not in response.text
    assert response.json()["error"]["code"] == "internal_error"


async def test_an_internal_key_is_required_where_one_is_set(tokenizer: ChatTokenizer) -> None:
    async with client(ScriptedEngine(tokenizer, "Hi."), tokenizer, internal_key="k") as http:
        assert (await ask(http)).status_code == 401
        assert (await http.get("/v1/models")).status_code == 401
        http.headers["authorization"] = "Bearer k"
        assert (await ask(http)).status_code == 200
        assert (await http.get("/health")).status_code == 200


async def test_unknown_paths_and_methods_in_openais_shape(tokenizer: ChatTokenizer) -> None:
    async with client(ScriptedEngine(tokenizer, "Hi."), tokenizer) as http:
        assert (await http.get("/v1/nothing")).json()["error"]["code"] == "not_found"
        assert (await http.get("/v1/chat/completions")).status_code == 405


async def test_a_template_that_refuses_is_a_400(models: Models, tmp_path: Path) -> None:
    folder = shutil.copytree(models.first.folder, tmp_path / "picky")
    (folder / "chat_template.jinja").write_text("{{ raise_exception('only haiku') }}")
    digest = file_digest(folder / "chat_template.jinja")
    picky = ChatTokenizer(folder, models.first.manifest.model_copy(update={"template_sha256": digest}))
    async with client(ScriptedEngine(picky, "Hi."), picky) as http:
        response = await ask(http)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")
    assert "only haiku" in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "add_generation_prompt", "tools"])
async def test_a_client_cannot_bring_its_own_template(tokenizer: ChatTokenizer, name: str) -> None:
    async with client(ScriptedEngine(tokenizer, "Hi."), tokenizer) as http:
        response = await ask(http, chat_template_kwargs={name: "{{ 7 }}"})
        assert (await ask(http, chat_template_kwargs={"enable_thinking": False})).status_code == 200
    assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template_kwargs")


BARE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
COUNTED = BARE + "{% if tools %}You have {{ tools | length }} tools.{% endif %}"
NAMED_ALONE = BARE + "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"


@pytest.mark.parametrize(
    ("template", "shows"),
    [(BARE, False), (COUNTED, False), (NAMED_ALONE, True), (BARE + "{{ tools | tojson if tools }}", True)],
    ids=["bare", "counted", "named", "all"],
)
async def test_tools_that_the_template_drops_are_refused(
    models: Models, tmp_path: Path, template: str, shows: bool
) -> None:
    folder = shutil.copytree(models.first.folder, tmp_path / "copy")
    (folder / "chat_template.jinja").write_text(template)
    digest = file_digest(folder / "chat_template.jinja")
    other = ChatTokenizer(folder, models.first.manifest.model_copy(update={"template_sha256": digest}))
    async with client(ScriptedEngine(other, "Hi."), other) as http:
        for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "required"}, {"stream": True}):
            response = await ask(http, tools=TOOLS, **choice)
            if shows:
                assert response.status_code == 200, response.text
                continue
            assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
            assert "does not show tools" in response.json()["error"]["message"]
        without: list[dict[str, Any]] = [{}, {"tools": []}, {"tools": TOOLS, "tool_choice": "none"}]
        for fields in without:
            assert (await ask(http, **fields)).status_code == 200
