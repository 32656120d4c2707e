"""Code fences of documentation pages and a small Headrace, so that tests can run the code that a page shows.

Arguments after the language of a fence state how to run it: `stack` with a running Headrace, `file=NAME` as a file of
this name in the folder of the page's other fences, `tutorial` in order with the page's other tutorial fences (`up` in
the background until the others have ended). Notebooks run with `stack`. Settings in fences are validated by the
services. `NOT_RUN` lists the fences that no test runs, with a reason; a fence may be excluded nowhere else.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from headrace.topics import Range, connected
from headrace_operations.supervisor.plan import installed
from headrace_runtime.main import Service
from headrace_runtime.settings.sections import ServiceSettings, load
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
from tests.support import tiny_model
from tests.support.service_process import HeadraceUp

ROOT = Path(__file__).resolve().parents[2]
RUN = {"python", "bash", "sh"}
PARSED = {"toml", "json", "yaml"}
"""TOML is read as Headrace's settings, too."""
SHOWN = {"text", "console", "mermaid", "diff"}
_FENCE = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
_NOTEBOOK = ".ipynb"
_HOW = re.compile(r"stack|tutorial|up|file=[\w./-]+")


@dataclass(frozen=True)
class Fence:
    """Code block with its language, run arguments, text and first line. `page` is relative to ROOT."""

    page: str
    line: int
    language: str
    how: tuple[str, ...]
    text: str

    @property
    def label(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def needs_stack(self) -> bool:
        return "stack" in self.how

    @property
    def is_step(self) -> bool:
        return "tutorial" in self.how

    @property
    def file(self) -> str | None:
        """Return the file name if the fence is a file, else None."""
        return next((word.removeprefix("file=") for word in self.how if word.startswith("file=")), None)


def fences(path: Path) -> list[Fence]:
    """Return every fence of a page in order. The code cells of a notebook are one fence, because they share their
    names."""
    if path.suffix == _NOTEBOOK:
        return [_cells(path)]
    page, text = str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    page_fences = []
    for match in _FENCE.finditer(text):
        language, *how = match.group(1).split() or [""]
        page_fences.append(Fence(page, text[: match.start()].count("\n") + 1, language, tuple(how), match.group(2)))
    return page_fences


def _cells(path: Path) -> Fence:
    cells = json.loads(path.read_bytes())["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return Fence(str(path.relative_to(ROOT)), 1, "python", ("stack",), "\n\n".join(code) + "\n")


def problem(fence: Fence) -> str | None:
    """Return the reason why `fence` would never be checked, or None if it is checked."""
    if fence.language not in RUN | PARSED | SHOWN:
        languages = ", ".join(sorted(RUN | PARSED | SHOWN))
        return f"{fence.label}: fence language {fence.language!r} is none of {languages}; name one"
    wrong = [word for word in fence.how if not _HOW.fullmatch(word)]
    return (
        f"{fence.label}: {wrong[0]!r} says nothing; a fence may have `stack`, `tutorial` or `file=NAME`"
        if wrong
        else None
    )


@cache
def pages() -> list[Path]:
    """Return every page of the repository, including notebooks."""
    listed = subprocess.run(
        ["git", "ls-files", "*.md", f"*{_NOTEBOOK}"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).exists()]


@cache
def tutorials() -> list[Path]:
    """Return the pages with tutorial fences."""
    return [page for page in pages() if any(fence.is_step for fence in fences(page))]


@cache
def all_fences() -> list[Fence]:
    """Return every fence of every page."""
    return [fence for page in pages() for fence in fences(page)]


_NEEDED = {
    "HEADRACE_TRAINER__BASE": "a-folder",
    "HEADRACE_JUDGE__ENDPOINT__BASE_URL": "http://127.0.0.1:1/v1",
    "HEADRACE_JUDGE__ENDPOINT__MODEL": "judge",
}
"""Settings without a default, for pages that show only others."""


def check(text: str, folder: Path) -> None:
    """Check that each service accepts its section in `text`. Raises `SettingError`."""
    path = folder / "shown.toml"
    path.write_text(text, encoding="utf-8")
    services = installed()
    named = [name for name in services if name in tomllib.loads(text)]
    for name in named or ["gateway"]:  # what is common to all, any of them checks
        service: Service[ServiceSettings] = import_module(f"{services[name].module}.__main__").SERVICE
        load(name, service.settings, path, _NEEDED)


_DEMO = "takes minutes; tests/e2e plays the shortened demo"
NOT_RUN = {
    ("README.md", "pip install"): "tests/integration/test_stranger.py installs the built wheels and plays the demo",
    (
        "packages/headrace/README.md",
        "pip install",
    ): "tests/integration/test_stranger.py installs the built wheels and plays the demo",
    ("README.md", "headrace up"): "runs until Ctrl-C; the stack of the other fences is started with exactly this file",
    ("deploy/README.md", "cp .env.example"): "builds images and starts containers; `make check NAME=compose` does that",
    ("examples/email_agent/README.md", "make demo"): _DEMO,
    (
        "examples/math_agent/README.md",
        "make example NAME=math",
    ): "takes up to ten minutes; its parts are tested in tests/unit",
    (
        "examples/werewolf/README.md",
        "make example NAME=werewolf",
    ): "takes up to twelve minutes; its parts are tested in tests/unit",
    (
        "examples/smollm2/README.md",
        "make install",
    ): "needs a package of 93 MB and 20 minutes; tests/unit/smollm2 tests its parts",
    ("examples/werewolf/README.md", "cd examples\nOPENAI_API_KEY"): "needs somebody else's server",
    (
        "examples/werewolf/README.md",
        "cd examples\npython -m werewolf.ablation",
    ): "tests/unit/werewolf plays it; the target holds its lines",
    ("examples/math_agent/README.md", "cd examples"): "needs somebody else's server",
    (
        "examples/email_search/README.md",
        "make example NAME=email",
    ): "takes up to eight minutes; its parts are tested in tests/unit",
    ("examples/email_search/README.md", "cd examples"): "needs somebody else's server",
    ("examples/email_agent/README.md", "cd examples"): "needs somebody else's server",
    ("examples/email_agent/README.md", "export PYTHONPATH"): f"runs until Ctrl-C; what the demo does, and that {_DEMO}",
}
"""Page and beginning of the fence to the reason."""


def key_of(fence: Fence) -> tuple[str, str] | None:
    """Return the `NOT_RUN` entry that excludes the fence, or None if it is run."""
    return next((key for key in NOT_RUN if fence.page == key[0] and fence.text.startswith(key[1])), None)


def executed(*, stack: bool) -> list[Fence]:
    """Return the program fences that run: those with a running Headrace, or the others.

    Fences of a tutorial run in `test_tutorials.py`.
    """
    walked = {str(page.relative_to(ROOT)) for page in tutorials()}
    candidates = [fence for fence in all_fences() if fence.language in RUN and fence.page not in walked]
    return [fence for fence in candidates if fence.needs_stack == stack and not key_of(fence)]


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
