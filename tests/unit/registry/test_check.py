"""A gate is tried once before anything is trained: against a stand-in for the gateway."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from headrace_registry.check import check, run_stand_in
from headrace_registry.settings import RegistrySettings
from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Common

GATE = """
import json, sys, urllib.request
base_url, = sys.argv[1:]
print(json.dumps({"gate": ["a", "b"], "audit": ["c"]}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    body = {"model": asked["version"], "messages": [{"role": "user", "content": "q"}]}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    print(json.dumps(asked | {"score": float(text == "42")}), flush=True)
"""


async def problems(tmp_path: Path, source: str, *, silence_s: float = 60.0) -> list[str]:
    (tmp_path / "gate.py").write_text(source)
    command = ["{python}", str(tmp_path / "gate.py"), "{base_url}"]
    settings = RegistrySettings.model_validate({"gate": {"command": command, "silence_s": silence_s}})
    return await check(Common(), settings)


async def test_check_accepts_any_scores(tmp_path: Path) -> None:
    assert await problems(tmp_path, GATE) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("print('score: 7')", "line 1 of its output is not"),
        ("""print('{"task": "a", "score": 0.5}')""", 'line 1 of its output is not {"gate": [names of tasks]'),
        ("""print('{"gate": ["a", "b"], "audit": ["b"]}')""", "1 tasks are in both gate and audit, e.g. 'b'"),
        ("", "the program ended before naming its tasks"),
    ],
)
async def test_check_refuses_a_failing_gate_with_its_message(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(SettingError, match=r"registry\.gate\.command.*against a stand-in gateway") as refused:
        await problems(tmp_path, source)
    assert message in str(refused.value)


def test_settings_refuse_a_gate_command_with_a_model_placeholder() -> None:
    """Such programs were started once for each version, named in the command."""
    with pytest.raises(ValidationError, match=r"names \{model\}: .* from its standard input.* docs/gate\.md"):
        RegistrySettings.model_validate({"gate": {"command": ["{python}", "gate.py", "{model}"]}})


async def test_check_refuses_a_missing_program(tmp_path: Path) -> None:
    settings = RegistrySettings.model_validate({"gate": {"command": [str(tmp_path / "nothing")]}})
    with pytest.raises(SettingError, match="No such file"):
        await check(Common(), settings)


async def test_check_accepts_a_slow_gate(tmp_path: Path) -> None:
    assert await problems(tmp_path, "import time; time.sleep(600)", silence_s=1.0) == []


async def test_check_passes_without_a_gate() -> None:
    assert await check(Common(), RegistrySettings()) == []


def test_stand_in_streams_and_accepts_feedback() -> None:
    with run_stand_in() as base_url:
        body = {"model": "m", "messages": [], "n": 2}
        completion = httpx.post(f"{base_url}/chat/completions", json=body).json()
        assert [choice["index"] for choice in completion["choices"]] == [0, 1]
        streamed = httpx.post(f"{base_url}/chat/completions", json=body | {"stream": True})
        assert streamed.headers["content-type"] == "text/event-stream"
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert httpx.post(f"{base_url}/feedback", json={}).status_code == 202
        assert httpx.get(f"{base_url}/models").json()["data"] == []


def test_stand_in_returns_token_ids_and_logprobs() -> None:
    with run_stand_in() as base_url:
        body = {"model": "m", "messages": [], "return_token_ids": True, "logprobs": True}
        completion = httpx.post(f"{base_url}/chat/completions", json=body).json()
    (choice,) = completion["choices"]
    counts = (len(completion["prompt_token_ids"]), len(choice["token_ids"]), len(choice["logprobs"]["content"]))
    assert counts == (completion["usage"]["prompt_tokens"], *[completion["usage"]["completion_tokens"]] * 2)
