"""Stage of the programs: a tiny model, stacks of it, an agent.

Values written by hand, for the comparison with programs and unit tests.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from headrace.stack import Stack, attach
from headrace_schemas import Dialogue, FunctionCall, Message, ToolCall, Trajectory
from headrace_schemas.values.ids import session_key
from tests.support import tiny_model
from tests.support.processes import wait_until

SMALL: dict[str, object] = {
    "inference.torch.device": "cpu",
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


EXPLORER: dict[str, Any] = {
    "mode": "serve", "project": "test", "name": "test", "checkpoint_root_dir": "/tmp/shared",
    "model": {"model_path": "models/Qwen3-tiny", "max_model_len": 8192, "max_response_tokens": 2048,
              "temperature": 0.7},
    "algorithm": {"algorithm_type": "reinforceplusplus"},
    "cluster": {"node_num": 1, "gpu_per_node": 4},
    "explorer": {
        "rollout_model": {
            "engine_num": 2, "tensor_parallel_size": 2, "enable_openai_api": True, "enable_history": True,
            "enable_auto_tool_choice": True, "tool_call_parser": "hermes", "dtype": "bfloat16", "seed": 42,
        },
        "service_status_check_interval": 10, "proxy_port": 8010,
    },
    "buffer": {
        "train_batch_size": 16,
        "trainer_input": {"experience_buffer": {"name": "exp_buffer", "storage_type": "sql"}},
    },
    "synchronizer": {"sync_method": "checkpoint", "sync_interval": 1},
    "monitor": {"monitor_type": "tensorboard"},
}  # fmt: skip
"""The keys of the document about the Java extension, of its explorer."""
TRAINER: dict[str, Any] = {
    **{key: EXPLORER[key] for key in ("project", "name", "checkpoint_root_dir", "model", "algorithm", "cluster")},
    "mode": "train",
    "buffer": {
        "train_batch_size": 32,
        "trainer_input": {"experience_buffer": {"name": "exp_buffer", "storage_type": "sql"}},
    },
    "trainer": {
        "save_interval": 16, "ulysses_sequence_parallel_size": 1, "save_hf_checkpoint": "always",
        "max_checkpoints_to_keep": 5,
        "trainer_config": {
            "trainer": {"balance_batch": False, "max_actor_ckpt_to_keep": 5, "max_critic_ckpt_to_keep": 5}
        },
    },
    "synchronizer": {"sync_method": "checkpoint", "sync_interval": 1},
    "monitor": {"monitor_type": "tensorboard"},
}  # fmt: skip
CONVERTED = {
    "data_dir": "/tmp/shared",
    "gateway.model_aliases": {"models/Qwen3-tiny": "Qwen3-tiny"},
    "gateway.port": 8010,
    "inference.port": 8011,
    "inference.tool_parser": "hermes",
    "inference.torch.context_tokens_max": 8192,
    "inference.torch.dtype": "bfloat16",
    "trainer.algorithm": "reinforce++",
    "trainer.base": "models/Qwen3-tiny",
    "trainer.batch_experiences": 32,
    "trainer.lineage": "test-test",
    "trainer.model": "Qwen3-tiny",
    "trainer.steps_per_version": 1,
}
"""Rewards of both records."""


def hand_made_trajectory() -> Trajectory:
    """A question, a thought with a tool call, its result, an answer."""
    call = ToolCall(id="call-1", function=FunctionCall(name="search", arguments='{"query": "invoice"}'))
    messages = (
        Message(role="user", content="Who sent the invoice?"),
        Message(role="assistant", content="I look for it.", tool_calls=(call,)),
        Message(role="tool", content="From: Ada", tool_call_id="call-1"),
        Message(role="assistant", content="Ada sent it."),
    )
    return Trajectory(
        time=datetime(2026, 1, 1, tzinfo=UTC),
        trajectory_id="t-1",
        session_key=session_key("default", "conv_001"),
        session_id="conv_001",
        model="tiny",
        branches=(),
        dialogues=(Dialogue(messages=messages),),
        end_reason="end_call",
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
    )


def the_record() -> dict[str, Any]:
    """The article's record of the trajectory."""
    return {
        "conversation_id": "conv_001",
        "messages": [
            {"role": "user", "content": "Who sent the invoice?"},
            {"role": "assistant", "content": "I look for it."},
            {"role": "tool", "content": "From: Ada"},
            {"role": "assistant", "content": "Ada sent it."},
        ],
        "thoughts": [{"step": 1, "content": "I look for it."}],
        "tool_calls": [{"tool": "search", "args": {"query": "invoice"}, "result": "From: Ada"}],
    }
