"""A gate is tried once before anything is trained: against a stand-in for the gateway."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from headrace_registry.check import check
from headrace_registry.settings import RegistrySettings
from headrace_registry.stand_in_gateway import answering
from headrace_runtime.errors import SettingError
from headrace_runtime.settings import Common

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


async def test_a_gate_that_prints_scores_is_fine_whatever_they_are(tmp_path: Path) -> None:
    assert await problems(tmp_path, GATE) == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("print('score: 7')", "line 1 of its output is not"),
        ("""print('{"task": "a", "score": 0.5}')""", 'line 1 of its output is not {"gate": [names of tasks]'),
        ("""print('{"gate": ["a", "b"], "audit": ["b"]}')""", "1 tasks are in both gate and audit, e.g. 'b'"),
        ("", "it ended before it had named its tasks"),
    ],
)
async def test_a_gate_that_does_not_run_is_refused_with_what_it_said(tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(SettingError, match=r"registry\.gate\.command.*against a stand-in gateway") as refused:
        await problems(tmp_path, source)
    assert said in str(refused.value)


def test_a_program_of_the_former_kind_is_refused_with_what_changed() -> None:
    """It was started for each version, which stood in its command."""
    with pytest.raises(ValidationError, match=r"names \{model\}: .* told on its standard input.* docs/gate\.md"):
        RegistrySettings.model_validate({"gate": {"command": ["{python}", "gate.py", "{model}"]}})


async def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    settings = RegistrySettings.model_validate({"gate": {"command": [str(tmp_path / "nothing")]}})
    with pytest.raises(SettingError, match="No such file"):
        await check(Common(), settings)


async def test_a_gate_that_takes_its_time_has_started_well(tmp_path: Path) -> None:
    assert await problems(tmp_path, "import time; time.sleep(600)", silence_s=1.0) == []


async def test_without_a_gate_there_is_nothing_to_try() -> None:
    assert await check(Common(), RegistrySettings()) == []


def test_the_stand_in_streams_and_takes_feedback() -> None:
    with answering() as base_url:
        body = {"model": "m", "messages": [], "n": 2}
        whole = httpx.post(f"{base_url}/chat/completions", json=body).json()
        assert [choice["index"] for choice in whole["choices"]] == [0, 1]
        streamed = httpx.post(f"{base_url}/chat/completions", json=body | {"stream": True})
        assert streamed.headers["content-type"] == "text/event-stream"
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert httpx.post(f"{base_url}/feedback", json={}).status_code == 202
        assert httpx.get(f"{base_url}/models").json()["data"] == []


def test_the_stand_in_has_tokens_for_who_records_them() -> None:
    with answering() as base_url:
        body = {"model": "m", "messages": [], "return_token_ids": True, "logprobs": True}
        whole = httpx.post(f"{base_url}/chat/completions", json=body).json()
    (choice,) = whole["choices"]
    counts = (len(whole["prompt_token_ids"]), len(choice["token_ids"]), len(choice["logprobs"]["content"]))
    assert counts == (whole["usage"]["prompt_tokens"], *[whole["usage"]["completion_tokens"]] * 2)
