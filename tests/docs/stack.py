"""Small Headrace that is started as in the README, and the trail of one turn through its topics."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from headrace.topics import Range, connected
from headrace_schemas import (
    Checkpoint,
    Event,
    Experience,
    Feedback,
    ModelEvent,
    Replica,
    Reward,
    Routing,
    TrainingMetrics,
    Trajectory,
    Turn,
)
from headrace_schemas.values.ids import derived_id, key_of_response
from tests.docs.fences import ROOT, Fence, fences
from tests.support import tiny_model
from tests.support.service_process import HeadraceUp

MODEL = "my-agent"
BATCH = 4
_SHOWN_URL = "http://127.0.0.1:8000"
_SMALL = {
    "inference.torch.device": "cpu",
    "trainer.batch_experiences": BATCH,
    "trainer.batch_experiences_min": BATCH,
    "trainer.steps_per_version": 1,
    "trainer.optimizer.learning_rate": 0.003,
    "trainer.compute.device": "cpu",
}
_FENCE_TIMEOUT_S = 240.0


class Folder:
    """Folder in which fences run: `headrace` and `python` are the repository's, and the gateway has its actual port."""

    def __init__(self, path: Path, gateway: str = _SHOWN_URL) -> None:
        self.path = path
        self.gateway = gateway

    def add_files(self, page: Path) -> None:
        """Write the fences of the page that are files."""
        for fence in fences(page):
            if fence.file is not None:
                target = self.path / fence.file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(fence.text, encoding="utf-8")

    def run(self, fence: Fence) -> str:
        """Run the fence and return its output. Raises `AssertionError` with the output when it fails."""
        text = fence.text.replace(_SHOWN_URL, self.gateway)
        command = (
            [sys.executable, "-c", text] if fence.language == "python" else ["bash", "-euo", "pipefail", "-c", text]
        )
        environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        process = subprocess.run(
            command, cwd=self.path, env=environ, capture_output=True, text=True, timeout=_FENCE_TIMEOUT_S, check=False
        )
        assert process.returncode == 0, (
            f"{fence.label} ended with {process.returncode}:\n{process.stdout}\n{process.stderr}"
        )
        return process.stdout


class Stack(Folder):
    """Folder of a running Headrace."""

    def __init__(self, path: Path, up: HeadraceUp) -> None:
        super().__init__(path, up.base_url.removesuffix("/v1"))
        self.bus = up.state.bus


@contextlib.contextmanager
def running(path: Path) -> Iterator[Stack]:
    """Start Headrace for the duration of the context. At the end, stop all services and check that they stopped
    cleanly."""
    Folder(path).add_files(ROOT / "README.md")
    tiny_model.build(path / "models" / "base")
    up = HeadraceUp(path / ".headrace", path / "headrace.toml", _SMALL, {})
    with contextlib.chdir(path):
        up.start()
    try:
        yield Stack(path, up)
    finally:
        status = up.stop()
    assert status == 0, up.log


FOLLOWED = ["turns", "feedback", "trajectories", "rewards", "experiences", "training-metrics", "checkpoints",
            "model-events", "routing", "replicas"]  # fmt: skip
"""The topics of a whole trail, in its order."""
E = TypeVar("E", bound=Event)


@dataclass
class Trail:
    """Steps that `follow` has found, in the order of the page, with topics as the page names them."""

    turn_id: str
    steps: list[str] = field(default_factory=list)
    version: str = ""
    """First version that serves with the lesson of the turn."""


class Missing(Exception):
    """Raised when the next event of a trail has not been published yet."""


class Log:
    """All events on the bus."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = events

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self._events if isinstance(event, kind)]


async def read(bus: str) -> Log:
    kinds = (Turn, Feedback, Trajectory, Reward, Experience, TrainingMetrics, Checkpoint, ModelEvent, Routing, Replica)
    events: list[Event] = []
    async with connected(bus) as topics:
        for kind in kinds:
            events += [entry.event async for entry in topics.read(Range(kind.topic)) if entry.event is not None]
    return Log(events)


def follow(log: Log, turn_id: str) -> Trail:
    """Follow the turn through the topics. Raises `Missing` with the topic at which the trail ends."""
    trail = Trail(turn_id)

    def step(kind: type[E], matching: list[E]) -> E:
        if not matching:
            raise Missing(f"{kind.topic}, after {trail.steps}")
        trail.steps.append(kind.topic)
        return matching[0]

    turn = step(Turn, [event for event in log.of(Turn) if event.turn_id == turn_id])
    assert turn.event_id == turn_id
    assert key_of_response(turn_id) == turn.session_key
    step(Feedback, [event for event in log.of(Feedback) if event.session_key == turn.session_key])
    trajectory = step(Trajectory, [event for event in log.of(Trajectory) if turn_id in event.turn_ids])
    assert trajectory.trajectory_id == derived_id("trajectory", turn.session_key, trajectory.turn_ids[0])
    sampled = turn.choices[0]
    branch = trajectory.branches[0]
    span = next(event for event in branch.spans if event.turn_id == turn_id)
    assert branch.token_ids[span.start : span.stop] == sampled.token_ids, "bit for bit (P2)"
    assert span.logprobs == sampled.logprobs
    assert span.version == turn.version
    rewards = [event for event in log.of(Reward) if event.trajectory_id == trajectory.trajectory_id]
    step(Reward, rewards)
    experience = step(
        Experience, [event for event in log.of(Experience) if event.trajectory_id == trajectory.trajectory_id]
    )
    assert experience.experience_id == Experience.id_of(trajectory.trajectory_id, 0)
    if unread := {part.source for part in experience.parts} - {event.source for event in rewards}:
        raise Missing(f"rewards of {sorted(unread)}, after {trail.steps}")  # topics are read one after the other
    reports = [event for event in log.of(TrainingMetrics) if _trained(event, experience)]
    report = step(TrainingMetrics, reports)
    # No version is made of a batch that moved no weights, as one with equal rewards alone: it is in the next one.
    first = report.step if report.version else report.step + 1
    after = [event for event in log.of(Checkpoint) if event.lineage == report.lineage and event.step >= first]
    checkpoint = step(Checkpoint, [event for event in after if report.version in (None, event.version)])
    assert checkpoint.event_id == derived_id("checkpoint", checkpoint.lineage, checkpoint.version)
    serving = {event.version for event in after}
    decided = [event for event in log.of(ModelEvent) if event.decision == "promoted" and event.version in serving]
    trail.version = step(ModelEvent, decided).version
    step(Routing, [event for event in log.of(Routing) if event.champion == trail.version])
    step(Replica, [event for event in log.of(Replica) if event.ready(trail.version)])
    return trail


def _trained(report: TrainingMetrics, experience: Experience) -> bool:
    return any(
        verdict.experience_id == experience.experience_id and verdict.dropped is None for verdict in report.verdicts
    )
