"""`headrace connect`: the configuration of each agent names the gateway, the key and the model."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headrace_cli.app import app
from headrace_cli.commands.connect import AGENTS


def connect(agent: str, *options: str) -> tuple[int, str]:
    arguments = ["connect", agent, "--base-url", "http://h:8000/v1/", "--api-key", "s3cret", *options]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    return result.exit_code, result.stdout if not result.exit_code else result.output


@pytest.mark.parametrize("agent", AGENTS)
def test_the_lines_name_gateway_key_and_model(agent: str) -> None:
    status, text = connect(agent, "--model", "my-agent")
    assert status == 0
    assert all(value in text for value in ("http://h:8000", "s3cret", "my-agent"))
    assert ("/v1" in text) == (agent != "claude-code"), "Anthropic's clients append /v1 themselves"


def test_codex_gets_toml_and_opencode_gets_json() -> None:
    settings = tomllib.loads(connect("codex", "--model", 'a"b')[1])
    assert settings["model"] == 'a"b'
    assert settings["model_providers"]["headrace"]["wire_api"] == "responses"
    provider = json.loads(connect("opencode", "--model", "m")[1])["provider"]["headrace"]
    assert provider["options"] == {"baseURL": "http://h:8000/v1", "apiKey": "s3cret"}


def test_an_unknown_agent_is_refused_with_the_known_ones() -> None:
    status, text = connect("nobody")
    assert status == 2
    assert "claude-code" in text


FILES = {
    "claude-code": ('{"env": {"FOO": "1", "ANTHROPIC_BASE_URL": "old"}, "theme": "dark"}', ("FOO", "theme")),
    "codex": (
        '# mine\nmodel = "o3"\napproval_policy = "never"\n'
        '[model_providers.headrace]\nbase_url = "old"\n\n[tui]\nbell = true\n',
        ("# mine", "approval_policy", "[tui]", "bell = true"),
    ),
    "opencode": ('{"provider": {"mine": {}}, "theme": "dark"}', ("mine", "theme")),
    "qwen-code": ("FOO=1\nOPENAI_BASE_URL=old\n", ("FOO=1",)),
    "aider": ("dark-mode: true\nopenai-api-base: old\n", ("dark-mode: true",)),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def path_of(agent: str, home: Path) -> Path:
    return home / AGENTS[agent].file.removeprefix("~/")


@pytest.mark.parametrize("agent", AGENTS)
def test_write_adds_the_lines_and_leaves_other_settings(home: Path, agent: str) -> None:
    before, kept = FILES[agent]
    file = path_of(agent, home)
    file.parent.mkdir(exist_ok=True)
    file.write_text(before)
    for _ in range(2):
        status, _ = connect(agent, "--model", "my-agent", "--write")
        assert status == 0
    after = file.read_text()
    assert all(text in after for text in (*kept, "http://h:8000", "my-agent"))
    assert "old" not in after
    assert after.count("http://h:8000") == 1, "a second time changes nothing"
    assert file.stat().st_mode & 0o077 == 0, "the file may hold a key"


@pytest.mark.parametrize("agent", AGENTS)
def test_write_creates_the_file(home: Path, agent: str) -> None:
    assert connect(agent, "--model", "m", "--write")[0] == 0
    assert "http://h:8000" in path_of(agent, home).read_text()


@pytest.mark.parametrize(
    ("agent", "content"),
    [
        ("opencode", "{ // a comment\n}"),
        ("opencode", "[]"),
        ("codex", "model = "),
        ("codex", 'notes = """\n[model_providers.headrace]\n"""\n'),
    ],
)
def test_write_refuses_a_file_that_it_cannot_merge(home: Path, agent: str, content: str) -> None:
    file = path_of(agent, home)
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    status, text = connect(agent, "--write")
    assert status == 2
    assert "without --write" in " ".join(text.split())
    assert file.read_text() == content


def test_write_keeps_the_earlier_file(home: Path) -> None:
    file = path_of("aider", home)
    file.write_text("dark-mode: true\n")
    for _ in range(2):
        connect("aider", "--write")
    assert file.with_name(f"{file.name}.before-headrace").read_text() == "dark-mode: true\n"
