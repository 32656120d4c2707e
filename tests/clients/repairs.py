"""Repositories with a generated bug, and coding agents that repair them: one running process for each conversation."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from headrace_cli.commands.connect import AGENTS, Connection

OPERATORS: Mapping[str, str] = {"total": "+", "difference": "-", "product": "*", "quotient": "//", "remainder": "%"}
"""Functions of the repositories and the operator that each of them needs."""
TASK = "The tests of calc.py fail. Repair it."
INSTRUCTIONS = "You repair programs."
_STEPS_MAX = 8
_ANSWER_TOKENS_MAX = 512
"""Limit of an answer of Claude Code, so that a model that never ends its answer does not fill its context."""
_ASK_TIMEOUT_S = 90.0
_TESTS_TIMEOUT_S = 30.0
_LINE_BYTES_MAX = 16 << 20
_QUIET = {
    "DISABLE_AUTOUPDATER": "1", "DISABLE_TELEMETRY": "1", "DISABLE_ERROR_REPORTING": "1", "NO_COLOR": "1",
    "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip


@dataclass(frozen=True)
class Bug:
    """A function with a wrong operator, and tests that fail because of it."""

    function: str
    wrong: str

    def write(self, folder: Path) -> None:
        """Write the repository."""
        folder.mkdir(parents=True)
        (folder / "calc.py").write_text(f"def {self.function}(a, b):\n    return a {self.wrong} b\n", encoding="utf-8")
        self._write_tests(folder)

    def is_repaired(self, folder: Path) -> bool:
        """Return the result of the original tests."""
        self._write_tests(folder)
        command = [sys.executable, "-m", "unittest", "--quiet"]
        try:
            process = subprocess.run(
                command, cwd=folder, capture_output=True, timeout=_TESTS_TIMEOUT_S, check=False, env=_environ(folder)
            )
        except subprocess.TimeoutExpired:
            return False
        return process.returncode == 0

    def _write_tests(self, folder: Path) -> None:
        pairs = ((17, 5), (9, 4), (23, 7))
        right = OPERATORS[self.function]
        cases = "".join(f"        self.assertEqual({self.function}({a}, {b}), {a} {right} {b})\n" for a, b in pairs)
        text = (
            f"import unittest\n\nfrom calc import {self.function}\n\n\nclass Test(unittest.TestCase):\n"
            f"    def test_values(self):\n{cases}"
        )
        (folder / "test_calc.py").write_text(text, encoding="utf-8")


def generate_bugs(draw: random.Random) -> list[Bug]:
    """Return two different bugs in each function, in a random order."""
    bugs = [
        Bug(function, wrong)
        for function, right in OPERATORS.items()
        for wrong in draw.sample(sorted({*OPERATORS.values()} - {right}), 2)
    ]
    return draw.sample(bugs, len(bugs))


class AgentFailed(Exception):
    """The agent reported an error, ended, or did not answer in time. Its message has the last output."""


class Agent:
    """A coding agent that runs until it is closed and answers one message after the other."""

    name: str

    def __init__(self, programs: Path, url: str, folder: Path) -> None:
        self.session_id = str(uuid.uuid4())
        self._programs = programs
        self._url = url
        self.repository = folder / "repository"
        self._home = folder / "home"
        self._home.mkdir(parents=True)
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        command, environ = self._command()
        with (self._home / "stderr.txt").open("wb") as errors:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                cwd=self.repository,
                env=_environ(self._home) | environ,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=errors,
                limit=_LINE_BYTES_MAX,
            )
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                await self._begin()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        if self._process.returncode is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), 10)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()

    async def ask(self, text: str) -> None:
        """Send a message and wait until the agent has finished its work on it.

        Raises:
            AgentFailed: the agent reported an error or did not finish in time.
        """
        try:
            async with asyncio.timeout(_ASK_TIMEOUT_S):
                await self._ask(text)
        except TimeoutError:
            raise AgentFailed(f"{self.name}: no end within {_ASK_TIMEOUT_S:g} s") from None

    def _command(self) -> tuple[list[str], dict[str, str]]:
        """Return the command line and further environment variables."""
        raise NotImplementedError

    async def _begin(self) -> None:
        """Prepare a conversation."""

    async def _ask(self, text: str) -> None:
        raise NotImplementedError

    async def _send(self, message: Mapping[str, object]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        await self._process.stdin.drain()

    async def _receive(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            errors = (self._home / "stderr.txt").read_text(errors="replace")
            raise AgentFailed(f"{self.name} ended: {errors[-1000:]}")
        message: dict[str, Any] = json.loads(line)
        return message


class ClaudeCode(Agent):
    """Claude Code with its own system prompt replaced and one tool, so that a tiny model can read its prompt."""

    name = "Claude Code"

    def _command(self) -> tuple[list[str], dict[str, str]]:
        options = [
            "--session-id", self.session_id, "--input-format", "stream-json", "--output-format", "stream-json",
            "--verbose", "--system-prompt", INSTRUCTIONS, "--tools", "Bash", "--allowedTools", "Bash", "--max-turns",
            str(_STEPS_MAX), "--setting-sources", "", "--strict-mcp-config", "--disable-slash-commands",
        ]  # fmt: skip
        return [str(self._programs / "claude"), "-p", *options], {
            "ANTHROPIC_BASE_URL": self._url,
            "ANTHROPIC_API_KEY": "none",
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(_ANSWER_TOKENS_MAX),
        }

    async def _ask(self, text: str) -> None:
        await self._send({"type": "user", "message": {"role": "user", "content": text}})
        while (message := await self._receive())["type"] != "result":
            pass
        if message["is_error"] and message["subtype"] != "error_max_turns":
            raise AgentFailed(f"{self.name}: {str(message)[:1000]}")


class Codex(Agent):
    """The server of Codex CLI, with its own instructions replaced and without agents, goals and skills."""

    name = "Codex CLI"

    def _command(self) -> tuple[list[str], dict[str, str]]:
        settings = self._home / ".codex"
        settings.mkdir()
        (settings / "config.toml").write_text(AGENTS["codex"].lines(Connection(self._url, "none", "coder")))
        (self._home / "instructions.md").write_text(INSTRUCTIONS)
        options = [
            "-c", f"model_instructions_file={self._home / 'instructions.md'}",
            "-c", "skills.include_instructions=false", "--disable", "multi_agent", "--disable", "goals",
        ]  # fmt: skip
        return [str(self._programs / "codex"), "app-server", *options], {
            "CODEX_HOME": str(settings),
            "HEADRACE_API_KEY": "none",
        }

    async def _begin(self) -> None:
        self._last_request = 0
        client = {"name": "headrace-tests", "title": "Headrace tests", "version": "1"}
        await self._call("initialize", {"clientInfo": client})
        await self._send({"method": "initialized"})
        thread = {"cwd": str(self.repository), "approvalPolicy": "never", "sandbox": "danger-full-access"}
        self.session_id = (await self._call("thread/start", thread))["thread"]["id"]

    async def _ask(self, text: str) -> None:
        await self._call("turn/start", {"threadId": self.session_id, "input": [{"type": "text", "text": text}]})
        while (message := await self._receive()).get("method") != "turn/completed":
            pass
        turn = message["params"]["turn"]
        if turn["status"] != "completed":
            raise AgentFailed(f"{self.name}: {str(turn)[:1000]}")

    async def _call(self, method: str, parameters: Mapping[str, object]) -> dict[str, Any]:
        """Send a request and return its result."""
        self._last_request += 1
        await self._send({"id": self._last_request, "method": method, "params": parameters})
        while True:
            message = await self._receive()
            if message.get("id") == self._last_request and "method" not in message:
                if "error" in message:
                    raise AgentFailed(f"{self.name}: {method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result


AGENT_KINDS: tuple[type[Agent], ...] = (ClaudeCode, Codex)


def _environ(home: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": str(home), "IS_SANDBOX": "1", **_QUIET}
