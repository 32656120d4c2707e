"""A small stack with its console: every service on a free port, a tiny model, and calls with chosen rewards."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx2
from aiokafka import AIOKafkaProducer

from headrace import Client
from headrace.producing import client_options
from headrace.registry import ModelRegistry
from headrace.sessions import Purpose
from headrace_operations.supervisor import Supervisor
from headrace_schemas.http.stack_access import make_login_token

MODEL = "m"
USERS = {"ann": "operator", "eve": "viewer"}
"""Role of each user. The user's token is the user's name; the setting holds its SHA-256."""
REWARDS = '''
"""Rewards that the id of the task chooses: `fail ...`, `none ...`, `equal ...`, or by the length of the answer."""


def chosen(trajectory, context):
    task = trajectory.task_id or ""
    if task.startswith("fail"):
        raise KeyError("answer")
    if task.startswith("none"):
        return None
    if task.startswith("equal"):
        return 0.5
    return (hash(trajectory.trajectory_id) % 1000) / 1000
'''
BATCHES = {
    "trainer.batch_experiences": 4,
    "trainer.batch_experiences_min": 4,
    "trainer.batch_wait_s": 1.0,
    "trainer.steps_per_version": 1,
    "trainer.save_interval_s": 0.5,
    "trainer.max_staleness": 64,
}


@dataclass(frozen=True)
class ConsoleStack:
    """A running stack, and the agent that calls its gateway."""

    supervisor: Supervisor
    folder: Path

    @property
    def url(self) -> str:
        """Address of the console."""
        return self.supervisor.url("console")

    def registry(self) -> ModelRegistry:
        """Open a client of the registry. The caller must close it."""
        return ModelRegistry(self.supervisor.url("registry"))

    def login_path(self) -> str:
        """Return a one-time path that logs the owner of the stack in."""
        return f"/login?token={make_login_token(self.folder)}"

    def call(
        self,
        task: str,
        *,
        purpose: Purpose = "train",
        ends: bool = True,
        value: float | None = None,
        **options: object,
    ) -> tuple[str, str]:
        """Play a session of one call. Return the ids of the session and of the response.

        Args:
            task: id of the task, which chooses the reward.
            purpose: purpose of the session.
            ends: whether the session ends with the call.
            value: feedback about the session.
            options: fields of the request.
        """
        with (
            Client(self.supervisor.url("gateway")) as client,
            httpx2.Client(timeout=60.0, trust_env=False) as http,
        ):
            session = client.session(task_id=task, purpose=purpose)
            body = {"model": MODEL, "max_tokens": 6, "messages": [{"role": "user", "content": "hello"}], **options}
            reply = http.post(f"{session.base_url}/chat/completions", json=body, headers=session.headers)
            assert reply.status_code == 200, reply.text
            if value is not None:
                session.feedback(value)
            if ends:
                session.end()
            return session.session_id, reply.json()["id"]

    def feedback(self, session_id: str, value: float) -> None:
        """Send feedback about a session."""
        with Client(self.supervisor.url("gateway")) as client:
            client.session(session_id).feedback(value)

    def end(self, session_id: str) -> None:
        """End a session."""
        with Client(self.supervisor.url("gateway")) as client:
            client.session(session_id).end()

    def send_garbage(self, records: int) -> None:
        """Send invalid records of the tenant `default` to the scorer's topic."""

        async def send() -> None:
            async with AIOKafkaProducer(**client_options(self.supervisor.plan.bus)) as producer:
                for number in range(records):
                    await producer.send_and_wait("trajectories", b'{"tenant":"default"}', str(number).encode())

        asyncio.run(send())


@contextlib.contextmanager
def console_stack(folder: Path, settings: Mapping[str, object], **options: object) -> Iterator[ConsoleStack]:
    """Start the services with `settings`, wait until all are healthy, and stop them after the block."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chosen_rewards.py").write_text(REWARDS, encoding="utf-8")
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [environ.get("PYTHONPATH")])])
    environ["OMP_NUM_THREADS"] = "1"
    chosen = {
        "trainer.model": MODEL,
        "trainer.compute.device": "cpu",
        "inference.torch.device": "cpu",
        "scorer.functions": ["chosen_rewards:chosen"],
        **settings,
    }
    data_dir = folder / "data"
    supervisor = Supervisor(data_dir, settings=chosen, auto_ports=True, environ=environ, **options)  # type: ignore[arg-type]
    try:
        supervisor.start()
        supervisor.wait_up(180)
        yield ConsoleStack(supervisor, data_dir)
    finally:
        supervisor.stop()
