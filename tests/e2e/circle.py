"""The whole circle: every service, an agent at work, and their visible results."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from openai import AsyncOpenAI

from email_agent.mailbox import DEFINITIONS, SYSTEM
from headrace.registry import ModelRegistry
from headrace.topics import Range, connected
from headrace_operations.from_topics import read_turn_account
from headrace_operations.turn_account import TurnAccount
from headrace_runtime.settings.sections import load
from headrace_schemas import (
    Checkpoint,
    DeadLetter,
    Event,
    Experience,
    Feedback,
    ModelEvent,
    Reward,
    TrainingMetrics,
    Trajectory,
    Turn,
)
from headrace_schemas.http.registry_api import VersionState
from headrace_schemas.rules.turn_history import TurnHistory
from tests.support.fake_llm import FakeLLM
from tests.support.service_process import HeadraceUp, as_setting

if TYPE_CHECKING:
    from headrace_trainer.settings import TrainerSettings

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CACHE = EXAMPLES.parent / ".cache" / "demo"
"""Folder in which `headrace demo` keeps its base models."""
CONFIG = EXAMPLES / "email_agent" / "headrace.toml"
WARM_UP_STEPS = 50
"""An eighth of the example's: such a model calls tools, and is still wrong nearly always."""
MODEL = "email-agent"
EVALUATE = ["{python}", "-m", "email_agent.evaluate", "--base-url", "{base_url}", "--gate", "--tasks", "8"]
_WAIT_S = 180.0
FACTS: tuple[type[Event], ...] = (
    Turn, Feedback, Trajectory, Reward, Experience, Checkpoint, TrainingMetrics, ModelEvent, DeadLetter,
)  # fmt: skip
E = TypeVar("E", bound=Event)


def base_model() -> Path:
    """Return the e-mail agent's, hardly warmed up. Takes a few seconds, and none once it has been built."""
    import torch

    from email_agent.build_base import LESSON
    from email_agent.demonstrations import Schedule

    torch.set_num_threads(1)  # so small a model gains nothing from a second one, and loses much on a busy machine
    folder: Path = LESSON.build(CACHE, LESSON.recipe(schedule=Schedule(steps=WARM_UP_STEPS)))
    return folder


def settings(base_model: Path, judge: FakeLLM) -> dict[str, object]:
    """On top of the example's: small batches, a version from each, evaluated and always good enough."""
    return {
        "trainer.base": str(base_model),
        "trainer.batch_experiences": 16,
        "trainer.batch_experiences_min": 1,
        "trainer.batch_wait_s": 2.0,
        "trainer.steps_per_version": 1,
        "trainer.max_staleness": 64,  # how fast this machine evaluates must not decide what is trained
        "registry.gate.command": EVALUATE,
        "registry.gate.margin": 1.0,
        "registry.gate.anchor_margin": 1.0,
        "registry.gate.audit_tasks": 4,
        "registry.gate.alpha": 0.5,  # little evidence is enough: nobody asks here how good versions are
        "registry.gate.concurrency": 8,  # fewer plays are under way in vain when it is
        "judge.endpoint.base_url": judge.base_url,
        "judge.endpoint.model": "judge-1",
        "scorer.expected": ["judge:helpfulness"],
        "scorer.weights": '{"function:*" = 1.0, "judge:*" = 0.1}',
    }


def trainer_settings(chosen: Mapping[str, object]) -> TrainerSettings:
    """Return the trainer settings of `up`."""
    from headrace_trainer.settings import TrainerSettings

    trainer_values = {name: value for name, value in chosen.items() if name.startswith("trainer.")}
    environ = {
        f"HEADRACE_{name.upper().replace('.', '__')}": as_setting(value) for name, value in trainer_values.items()
    }
    return load("trainer", TrainerSettings, CONFIG, environ)[1]


def up(folder: Path, chosen: Mapping[str, object]) -> HeadraceUp:
    """Every installed service, as a user starts them; the example is importable for gate and rewards."""
    paths = [str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return HeadraceUp(folder, CONFIG, chosen, {"PYTHONPATH": os.pathsep.join(paths)})


@dataclass
class Observed:
    """Return all events on the bus by kind."""

    events: dict[type[Event], list[Event]]

    def all(self, kind: type[E]) -> list[E]:
        """Return the events in order within each partition, duplicates included."""
        return [event for event in self.events[kind] if isinstance(event, kind)]


async def observe(bus: str) -> Observed:
    """Read the topics from their beginning, outside all consumer groups. A record that is no event fails the test."""
    events: dict[type[Event], list[Event]] = {kind: [] for kind in FACTS}
    history = TurnHistory()
    async with connected(bus) as topics:
        for kind in FACTS:
            async for entry in topics.read(Range(kind.topic)):
                position = f"{entry.topic}/{entry.partition}/{entry.offset}"
                assert entry.event is not None, f"{position}: {entry.problem}"
                event = entry.event
                events[kind].append(history.whole_turn(event) if isinstance(event, Turn) else event)
    return Observed(events)


@dataclass(frozen=True)
class Received:
    """A client's answer to one call that requested its token ids."""

    response_id: str
    version: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]


@dataclass
class Work:
    """Answers of the clients during the run."""

    agent: dict[str, Any] = field(default_factory=dict)
    """The agent's own summary."""
    received: list[Received] = field(default_factory=list)


async def work(circle: HeadraceUp, until: Callable[[], bool], witnesses: int, out: Path) -> Work:
    """Let the e-mail agent work until `until`, together with clients that compare their tokens."""
    finished = Work()
    async with agent(circle.base_url, out) as process, AsyncOpenAI(base_url=circle.base_url, api_key="none") as client:
        talks = await asyncio.gather(*(_talk(client, number) for number in range(witnesses)))
        await _until(lambda: process.returncode is not None or until(), "what the agent works for")
    finished.received = [call for talk in talks for call in talk]
    finished.agent = _summary(out)
    return finished


def _summary(path: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return summary


@contextlib.asynccontextmanager
async def agent(base_url: str, out: Path) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run the example's own program in a process; it finishes its current task at the end."""
    command = [
        sys.executable, "-m", "email_agent.agent", "--base-url", base_url, "--out", str(out), "--quiet",
        "--concurrency", "3",
    ]  # fmt: skip
    process = await asyncio.create_subprocess_exec(*command, cwd=EXAMPLES, stdout=subprocess.DEVNULL)
    try:
        yield process
        process.terminate()
        assert await asyncio.wait_for(process.wait(), 60) == 0, "it has failed requests"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def versions(circle: HeadraceUp) -> tuple[VersionState, ...]:
    """Return the registry's versions, the newest first."""
    with ModelRegistry(circle.state.services["registry"].url) as registry:
        return registry.versions(MODEL)


def promotions(circle: HeadraceUp) -> int:
    """Return the number of versions that have been champion."""
    return sum(_decided(version, "promoted") for version in versions(circle))


async def _talk(client: AsyncOpenAI, number: int) -> list[Received]:
    """Two turns at another temperature in each conversation, then feedback that ends it."""
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"Question {number}?"}]
    received: list[Received] = []
    for follow_up in ("Are you sure?", None):
        answer = await client.chat.completions.create(
            model=MODEL, messages=messages, tools=DEFINITIONS, temperature=(0.6, 1.0, 1.3)[number % 3], max_tokens=32,
            logprobs=True, extra_body={"return_token_ids": True},
        )  # fmt: skip
        received.append(_received(answer))
        messages += [answer.choices[0].message.to_dict(), {"role": "user", "content": follow_up}]
    body = {
        "msg_ids": [call.response_id for call in received],
        "ends_session": True,
        "task_id": "talk",
        "value": number % 2,
        "context": {"expected": "yes"},
    }
    await client.post("/feedback", body=body, cast_to=object)
    return received


def _received(answer: Any) -> Received:
    choice = answer.choices[0]
    logprobs = [token.logprob for token in choice.logprobs.content]
    return Received(answer.id, answer.model, answer.prompt_token_ids, choice.token_ids, logprobs)


async def settled(circle: HeadraceUp) -> TurnAccount:
    """Return the account once all captured turns are trained or dropped and every version has a decision.

    A version is announced before the outcomes of its batch, and the registry reads of it later: after the last open
    turn a gate may still have tasks to play.
    """
    deadline = time.monotonic() + _WAIT_S
    while True:
        account = await read_turn_account(circle.state.bus)
        all_versions = versions(circle)
        undecided = [entry.id for entry in all_versions if entry.state in ("registered", "probing", "evaluating")]
        undecided += [entry.id for entry in _last_champions(all_versions) if not _decided(entry, "evaluated")]
        if not account.waiting and not undecided:
            announced = {entry.version for entry in (await observe(circle.state.bus)).all(Checkpoint)}
            if announced == {entry.id for entry in all_versions}:
                return account
        assert time.monotonic() < deadline, f"{account}; undecided: {undecided} of {len(all_versions)} versions"
        await asyncio.sleep(0.5)


def _last_champions(all_versions: tuple[VersionState, ...]) -> list[VersionState]:
    """Return the champion and the one before it. A version that is overtaken twice during its audit has no score."""
    return [version for version in all_versions if _decided(version, "promoted")][:2]


def _decided(version: VersionState, decision: str) -> bool:
    return any(entry.decision == decision for entry in version.decisions)


async def _until(condition: Callable[[], bool], label: str) -> None:
    """Wait for the condition. Raises `TimeoutError` that names `label`."""
    deadline = time.monotonic() + _WAIT_S
    while not await asyncio.to_thread(condition):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{label}: not after {_WAIT_S} s")
        await asyncio.sleep(0.5)
