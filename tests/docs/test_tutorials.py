"""Tests that run each tutorial, and the fences that need a running Headrace, like a reader.

The environment sees the packages of the tests' environment; packages that a page installs stay in it.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import httpx
import pytest

from headrace import Client
from headrace_schemas import Turn
from tests.docs.fences import (
    BATCH,
    FOLLOWED,
    MODEL,
    ROOT,
    Fence,
    Missing,
    Stack,
    Trail,
    executed,
    fences,
    follow,
    read,
    running,
    tutorials,
)
from tests.support import tiny_model
from tests.support.processes import free_port, wait_until
from tests.support.service_process import run_of

_SHOWN_URL = "http://127.0.0.1:8000"
_SHOWN_PORTS = ("8040", "9092")
"""Ports that pages name for a service of their own and for the bus."""
_READY_S = 300.0
_STOP_S = 90.0
WAIT_S = 120.0


class Walk:
    """Run of one tutorial page. The end of the `with` block stops all started processes."""

    def __init__(self, page: Path, folder: Path) -> None:
        self._page = page
        self.folder = folder
        self._environment = _environment(folder)
        self._changes = {shown_port: str(free_port()) for shown_port in _SHOWN_PORTS}
        self._up: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Walk:
        self._write_files()
        return self

    def __exit__(self, *_: object) -> None:
        if self._up is not None:
            self._up.send_signal(signal.SIGINT)
            try:
                self._up.wait(_STOP_S)
            finally:
                self._up.kill()

    def steps(self) -> list[Fence]:
        return [fence for fence in fences(self._page) if fence.is_step]

    def walk(self, fence: Fence, timeout_s: float) -> str:
        """Run the fence and return its output."""
        if "up" in fence.how:
            self._start(fence)
            return ""
        process = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self._with_real_ports(fence.text)],
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert process.returncode == 0, (
            f"{fence.label} ended with {process.returncode}:\n{process.stdout}\n{self._log()}"
        )
        return process.stdout

    def _start(self, fence: Fence) -> None:
        """Start a command in the background on free ports, and return once all services are ready."""
        command = f"exec {self._with_real_ports(fence.text).strip()} --auto-ports"
        with (self.folder / "up.log").open("wb") as log:
            self._up = subprocess.Popen(
                ["bash", "-c", command], cwd=self.folder, env=self._environment, stdout=log, stderr=log
            )
        wait_until(self._ready, _READY_S, f"{fence.label} is ready")
        state = run_of(self.folder / ".headrace")
        assert state is not None
        if "gateway" in state.services:
            self._changes[_SHOWN_URL] = state.services["gateway"].url
        self._write_files()

    def _ready(self) -> bool:
        assert self._up is not None
        assert self._up.poll() is None, self._log()
        state = run_of(self.folder / ".headrace")
        return state is not None and state.ready

    def _log(self) -> str:
        path = self.folder / "up.log"
        return path.read_text(encoding="utf-8")[-3000:] if path.exists() else ""

    def _write_files(self) -> None:
        for fence in fences(self._page):
            if fence.file is not None:
                path = self.folder / fence.file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(self._with_real_ports(fence.text), encoding="utf-8")

    def _with_real_ports(self, text: str) -> str:
        for shown_port, real in self._changes.items():
            text = text.replace(shown_port, real)
        return text


def _environment(folder: Path) -> dict[str, str]:
    """Create a virtual environment on top of this one, and return its environment variables.

    It sees the packages of this environment, further packages are installed into it, and repository packages in the
    folder come first.
    """
    environment = folder / ".venv"
    venv.create(environment, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(environment), "platbase": str(environment)})
    own_packages, packages = sysconfig.get_path("purelib"), Path(paths["purelib"])
    (packages / "0_here.pth").write_text("".join(f"{source}\n" for source in folder.glob("*/src")), encoding="utf-8")
    (packages / "1_below.pth").write_text(f"import site; site.addsitedir({own_packages!r})\n", encoding="utf-8")
    scripts = environment / "bin"
    for entry in entry_points(group="console_scripts"):
        if entry.name in {"headrace", "pytest", "pip"}:
            module, _, function = entry.value.partition(":")
            script = scripts / entry.name
            script.write_text(f"#!{scripts / 'python'}\nimport {module}, sys\nsys.exit({module}.{function}())\n")
            script.chmod(0o755)
    environ = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}}
    path = f"{scripts}{os.pathsep}{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    # Nothing is fetched: what a page's package needs is here already.
    return environ | {"PATH": path, "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", "PIP_QUIET": "1"}


def copy_of_repository(root: Path, target: Path, folders: tuple[str, ...]) -> None:
    """Copy parts of the repository, for a page that changes them."""
    listed = subprocess.run(["git", "ls-files", *folders], cwd=root, capture_output=True, text=True, check=True)
    for name in listed.stdout.splitlines():
        if (root / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / name, target / name)


TUTORIALS = ROOT / "docs" / "tutorials"
OWN_MODEL = TUTORIALS / "own-model.md"
EVENT_FIELD = TUTORIALS / "add-an-event-field.md"
STEP_S = 600.0
RISE_MIN = 0.2


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", [page for page in tutorials() if page != OWN_MODEL], ids=lambda page: page.stem)
def test_what_the_page_says_works(page: Path, tmp_path: Path) -> None:
    if page == EVENT_FIELD:
        copy_of_repository(ROOT, tmp_path, ("pyproject.toml", "schemas", "tests/__init__.py", "tests/unit/schemas"))
    elif "models/base" in page.read_text(encoding="utf-8"):
        tiny_model.build(tmp_path / "models" / "base")
    with Walk(page, tmp_path) as walk:
        for fence in walk.steps():
            walk.walk(fence, STEP_S)


@pytest.mark.long
@pytest.mark.timeout(2400)
def test_held_out_success_rises_with_nothing_but_the_page(tmp_path: Path) -> None:
    """The page uses a new user's model, agent, reward and gate with default settings."""
    with Walk(OWN_MODEL, tmp_path) as walk:
        output = "".join(walk.walk(fence, 1500) for fence in walk.steps())
    before, after = (float(number) for number in re.findall(r"^([01]\.\d{3}) my-agent@", output, re.MULTILINE))
    assert after - before >= RISE_MIN, output


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Yield one running Headrace for all pages."""
    with running(tmp_path_factory.mktemp("stack")) as started:
        yield started


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_a_turn_takes_the_way_of_the_story(stack: Stack) -> None:
    """Follow a turn through `docs/life-of-a-trajectory.md`: its steps are exactly those on the page.

    This test is the first on its stack, because waiting experiences of others would enter its batches.
    """
    calls = [call(stack, number) for number in range(2 * BATCH)]
    turn_ids = await asyncio.gather(*calls)
    trail = await until_followed(stack, turn_ids[0])
    assert trail.steps == FOLLOWED
    before = {turn.version for turn in (await read(stack.bus)).of(Turn) if turn.turn_id in turn_ids}
    async with httpx.AsyncClient(base_url=stack.gateway, timeout=30) as http:
        answer = await ask(http, "walk-on", "And now?")
    assert answer["model"].startswith(f"{MODEL}@")
    assert answer["model"] not in before, "the swapped weights answer"


async def call(stack: Stack, number: int) -> str:
    """Send a session with one turn and alternately good or bad feedback. Return the turn's id."""
    session = f"walk-{number}"
    async with httpx.AsyncClient(base_url=stack.gateway, timeout=60) as http:
        answer = await ask(http, session, "Who sent the mail about the meeting?")

    def judge() -> None:
        with Client(stack.gateway) as client, client.session(session, task_id="walk") as judged:
            judged.feedback(float(number % 2))

    await asyncio.to_thread(judge)
    return str(answer["id"])


async def ask(http: httpx.AsyncClient, session: str, text: str) -> dict[str, str]:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 8}
    response = await http.post("/v1/chat/completions", json=body, headers={"X-Session-Id": session})
    assert response.status_code == 200, response.text
    answer: dict[str, str] = response.json()
    return answer


async def until_followed(stack: Stack, turn_id: str) -> Trail:
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return follow(await read(stack.bus), turn_id)
        except Missing:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.5)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fence", executed(stack=True), ids=lambda fence: fence.label)
def test_code_runs_on_a_running_headrace(fence: Fence, stack: Stack) -> None:
    stack.add_files(ROOT / fence.page)
    stack.run(fence)
