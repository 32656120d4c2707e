"""`headrace connect`: prints the lines that configure an agent for the gateway, or adds them to the agent's file.

Other settings in the file are preserved.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace.errors import UsageError
from headrace_cli.commands.shared import DataDir, command, echo, running_state
from headrace_schemas.values.text import printable, read_user_text

_TABLE = re.compile(r"^\s*\[")
_KEY = re.compile(r"^\s*(?:export\s+)?([\w.-]+)\s*[:=]")
_DEFAULT_URL = "http://127.0.0.1:8000"


def merge_json(text: str, lines: str) -> str:
    """Return the JSON file `text` with the values of `lines` added. Raises `ValueError` if it is no JSON object."""
    current = json.loads(text or "{}")
    if not isinstance(current, dict):
        raise ValueError("it is no JSON object")
    return json.dumps(_merge(current, json.loads(lines)), indent=2, ensure_ascii=False) + "\n"


def merge_toml(text: str, lines: str) -> str:
    """Return the TOML file `text` with the top-level keys and tables of `lines` added.

    Raises:
        ValueError: the file has a form that cannot be edited line by line.
    """
    expected = _merge(tomllib.loads(text), tomllib.loads(lines))
    top, tables = _split_toml(lines)
    current_top, current_tables = _split_toml(text)
    headers = {block.partition("\n")[0].strip() for block in tables}
    other_tables = [block for block in current_tables if block.partition("\n")[0].strip() not in headers]
    first = merge_lines("\n".join(current_top), "\n".join(top)).strip()
    merged = "\n\n".join(block.strip() for block in [first, *other_tables, *tables]) + "\n"
    if tomllib.loads(merged) != expected:
        raise ValueError("its values are in a form that cannot be edited line by line")
    return merged


def merge_lines(text: str, lines: str) -> str:
    """Return a file of `NAME=VALUE` or `name: value` lines with those of `lines`, which replace lines of the
    same name.
    """
    replacements = {name: line for line in lines.splitlines() if (name := _name_of(line))}
    other_lines = [line for line in text.splitlines() if _name_of(line) not in replacements]
    return "\n".join([*other_lines, *replacements.values()]) + "\n"


def write(file: Path, content: str) -> Path | None:
    """Write `content` to a file in one step, readable only by its owner.

    Returns:
        The path of a copy of the previous file, or None if there was none or a copy exists already.

    Raises:
        UsageError: the file cannot be written.
    """
    from headrace_runtime.storage.disk import open_for_owner, replace_file

    backup = None
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.exists():
            backup = file.with_name(f"{file.name}.before-headrace")
            if not backup.exists():
                replace_file(backup, file.read_bytes(), opener=open_for_owner)
        replace_file(file, content.encode(), opener=open_for_owner)
    except OSError as error:
        raise UsageError(f"{file}: cannot be written: {error.strerror}; check the folder and its permissions") from None
    return backup


def read(file: Path) -> str:
    """Return the text of a file, or an empty text if it does not exist. Raises `UsageError` if it cannot be read."""
    try:
        return read_user_text(file)
    except FileNotFoundError:
        return ""
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read: {error}; print the lines without --write, and add them") from None


def _merge(current: Mapping[str, Any], added: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(current)
    for name, value in added.items():
        inner = merged.get(name)
        merged[name] = _merge(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _split_toml(text: str) -> tuple[list[str], list[str]]:
    """Return the lines before the first table of a TOML file, and the text of each table, beginning with its header."""
    top: list[str] = []
    tables: list[str] = []
    for line in text.splitlines():
        if _TABLE.match(line):
            tables.append(line)
        elif tables:
            tables[-1] += f"\n{line}"
        else:
            top.append(line)
    return top, tables


def _name_of(line: str) -> str | None:
    match = _KEY.match(line)
    return match.group(1) if match else None


@dataclass(frozen=True, slots=True)
class Connection:
    """URL, key and model that the configuration of an agent names."""

    url: str
    """The gateway without `/v1`."""
    key: str
    model: str


def _claude_code(connection: Connection) -> str:
    return _environment(_claude_code_variables(connection))


def _claude_code_settings(connection: Connection) -> str:
    return json.dumps({"env": _claude_code_variables(connection)})


def _claude_code_variables(connection: Connection) -> dict[str, str]:
    lines = {"ANTHROPIC_BASE_URL": connection.url, "ANTHROPIC_API_KEY": connection.key}
    return {**lines, "ANTHROPIC_MODEL": connection.model, "ANTHROPIC_SMALL_FAST_MODEL": connection.model}


def _codex(connection: Connection) -> str:
    lines = [
        f"model = {json.dumps(connection.model)}",
        'model_provider = "headrace"',
        "",
        "[model_providers.headrace]",
        'name = "Headrace"',
        f"base_url = {json.dumps(connection.url + '/v1')}",
        'wire_api = "responses"',
        'env_key = "HEADRACE_API_KEY"',
        f"# export HEADRACE_API_KEY={connection.key}",
    ]
    return "\n".join(lines)


def _opencode(connection: Connection) -> str:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Headrace",
        "options": {"baseURL": f"{connection.url}/v1", "apiKey": connection.key},
        "models": {connection.model: {}},
    }
    settings = {"provider": {"headrace": provider}, "model": f"headrace/{connection.model}"}
    return json.dumps({"$schema": "https://opencode.ai/config.json", **settings}, indent=2)


def _qwen_code(connection: Connection) -> str:
    lines = {"OPENAI_BASE_URL": f"{connection.url}/v1", "OPENAI_API_KEY": connection.key}
    return _environment({**lines, "OPENAI_MODEL": connection.model})


def _qwen_code_file(connection: Connection) -> str:
    return _qwen_code(connection).replace("export ", "")


def _aider(connection: Connection) -> str:
    lines = {"openai-api-base": f"{connection.url}/v1", "openai-api-key": connection.key}
    return "\n".join(f"{name}: {value}" for name, value in {**lines, "model": f"openai/{connection.model}"}.items())


def _environment(variables: dict[str, str]) -> str:
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in variables.items())


@dataclass(frozen=True, slots=True)
class Agent:
    """Lines that configure one agent for the gateway, and the file to which `--write` adds them."""

    destination: str
    """Text that tells users where to put the printed lines."""
    lines: Callable[[Connection], str]
    file: str
    """The file that `--write` changes: in the home directory, or in the working directory."""
    merge: Callable[[str, str], str]
    """Returns the file's text with the agent's lines."""
    file_lines: Callable[[Connection], str] | None = None
    """Function that builds the lines for the file, or None if they are the printed lines."""


AGENTS: dict[str, Agent] = {
    "claude-code": Agent(
        "environment of the shell", _claude_code, ".claude/settings.json", merge_json, _claude_code_settings
    ),
    "codex": Agent("~/.codex/config.toml", _codex, "~/.codex/config.toml", merge_toml),
    "opencode": Agent("opencode.json", _opencode, "opencode.json", merge_json),
    "qwen-code": Agent(
        "environment of the shell, or .qwen/.env", _qwen_code, ".qwen/.env", merge_lines, _qwen_code_file
    ),
    "aider": Agent(".aider.conf.yml", _aider, ".aider.conf.yml", merge_lines),
}


def connect(
    agent: Annotated[str, typer.Argument(help=f"Agent: {', '.join(AGENTS)}.", metavar="AGENT")],
    model: Annotated[str, typer.Option(help="Model of the calls; default: the model that is trained here.")] = "",
    base_url: Annotated[
        str | None, typer.Option(help="URL of the gateway; default: the gateway that runs here.")
    ] = None,
    api_key: Annotated[str, typer.Option(help="API key of the gateway; any text while it has no keys.")] = "none",
    write_file: Annotated[
        bool, typer.Option("--write", help="Add the lines to the agent's file instead; other settings in it stay.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """Print the lines of configuration that connect an agent with the gateway, or write them to its file."""
    if agent not in AGENTS:
        raise UsageError(f"agent {printable(repr(agent))}: is not known; the agents are {', '.join(AGENTS)}")
    url = (base_url or _running_url(data_dir)).rstrip("/").removesuffix("/v1")
    chosen, connection = AGENTS[agent], Connection(url, api_key, model or "headrace")
    if write_file:
        _write(chosen, connection)
        return
    echo(f"for {chosen.destination}:", error=True)
    echo(chosen.lines(connection))


def _write(agent: Agent, connection: Connection) -> None:
    file = Path(agent.file).expanduser()
    lines = (agent.file_lines or agent.lines)(connection)
    try:
        content = agent.merge(read(file), lines)
    except (ValueError, RecursionError) as error:
        problem = printable(str(error))
        raise UsageError(
            f"{file}: cannot be changed: {problem}; print the lines without --write, and add them"
        ) from None
    backup = write(file, content)
    echo(f"written: {file}" + (f" (before: {backup})" if backup else ""))
    if agent.lines is _codex:
        echo(f"set in the shell: export HEADRACE_API_KEY={shlex.quote(connection.key)}")


def _running_url(data_dir: Path | None) -> str:
    """Return the URL of the gateway that runs on the data directory, or the default URL if none runs."""
    from headrace_operations.supervisor.state import NotRunning

    try:
        return running_state(data_dir).base_url or _DEFAULT_URL
    except NotRunning:
        return _DEFAULT_URL


def add_to(app: typer.Typer) -> None:
    """Add the command `connect` to `app`."""
    command(
        app,
        connect,
        "headrace connect claude-code",
        "headrace connect codex --model my-agent --write",
    )
