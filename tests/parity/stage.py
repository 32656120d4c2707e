"""Stage of the programs: a tiny model, stacks of it, an agent."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from headrace.stack import Stack, attach
from tests.support import tiny_model
from tests.support.processes import wait_until

SMALL: dict[str, object] = {
    "inference.torch.device": "cpu",
    "inference.heartbeat_s": 0.5,
    "trainer.compute.device": "cpu",
    "trainer.native.tokens": 256,
}
LIVE: dict[str, object] = {
    "trainer.algorithm": "reinforce++",
    "trainer.optimizer.learning_rate": 1e-3,
    "trainer.batch_experiences": 4,
    "trainer.batch_experiences_min": 1,
    "trainer.batch_wait_s": 10.0,
}
"""Settings of the shared stack. Remaining runs of one program delay no run of the next."""
Program = Callable[["Stage"], None]
PROGRAMS: dict[str, Program] = {}
OWN: set[str] = set()
"""Programs that start stacks of their own, or none."""


def program(name: str, *, own_stack: bool = False) -> Callable[[Program], Program]:
    """Announce a program. It raises where a result differs from the documents."""

    def keep(function: Program) -> Program:
        PROGRAMS[name] = function
        if own_stack:
            OWN.add(name)
        return function

    return keep


@dataclass
class Stage:
    """A folder, with the base model in it. `stack` is the shared one, while it runs."""

    folder: Path
    stack: Stack = field(init=False)

    @cached_property
    def base(self) -> Path:
        return tiny_model.build(self.folder / "tiny")

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        with attach(base=self.base, settings=SMALL | LIVE) as self.stack:
            yield

    def back_to_training(self, version: str) -> None:
        """Roll back a job's version that serves: its answers are foreign to the lineage that is trained online."""
        self.stack.registry.roll_back(self.stack.model, reason="online training goes on")
        wait_until(lambda: self.stack.serving() != version, 120.0, "another version serves")

    @contextlib.contextmanager
    def working_folder(self, name: str) -> Iterator[Path]:
        """A new folder, and the current one for the body."""
        folder = self.folder / name
        folder.mkdir()
        with contextlib.chdir(folder):
            yield folder

    def headrace(self, *words: str) -> str:
        """Return the output of the command. Raises with the output when it fails."""
        environ = {**os.environ, "COLUMNS": "200"}
        command = [str(Path(sys.executable).with_name("headrace")), *words]
        process = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
        assert process.returncode == 0, process.stdout + process.stderr
        return process.stdout


class ChatAgent:
    """An agent as people have it: an OpenAI client, a model's name, `run(text)`."""

    def __init__(self, reply: Callable[[str, str], str] = lambda _question, answer: answer) -> None:
        from openai import OpenAI

        self.client: Any = OpenAI(base_url="http://127.0.0.1:9/v1", api_key="-")
        self.model = "some-model"
        self.calls = 0
        self._reply = reply

    def run(self, text: str) -> str:
        self.calls += 1
        messages: Any = [{"role": "user", "content": text}]
        completion = self.client.chat.completions.create(model=self.model, messages=messages, max_tokens=6)
        return self._reply(text, completion.choices[0].message.content or "")


class AsyncAgent(ChatAgent):
    """The same agent for async callers."""

    def __init__(self) -> None:
        super().__init__()
        from openai import AsyncOpenAI

        self.client = AsyncOpenAI(base_url="http://127.0.0.1:9/v1", api_key="-")

    async def run(self, text: str) -> str:  # type: ignore[override]
        messages: Any = [{"role": "user", "content": text}]
        completion = await self.client.chat.completions.create(model=self.model, messages=messages, max_tokens=6)
        return completion.choices[0].message.content or ""


def raises(kind: type[Exception], words: str, work: Callable[[], object]) -> None:
    """Asserts that `work` is refused with these words."""
    with pytest.raises(kind, match=re.escape(words)):
        work()
