"""`headrace connect`: the configuration of each agent names the gateway, the key and the model."""

from __future__ import annotations

import json
import tomllib

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
