"""Tests of `headrace demo`: its options, its untrained models, its agent, and its error messages.

The agent ends with the demo, however the demo ends. Untrained models are pinned and served before the agent starts. A
demo that waits in vain reports the reason.
"""

from __future__ import annotations

import asyncio
import io
import re
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from headrace.errors import UsageError
from headrace_cli.commands import demo as command
from headrace_cli.demo import console_reporter, demo_run, recipe, runner
from headrace_cli.demo.console_reporter import VersionAudit, Watch
from headrace_cli.demo.demo_run import DemoRun, Options, StackAddress
from headrace_cli.demo.report import Report
from headrace_cli.terminal import ProgressDisplay
from headrace_operations import catalog
from headrace_operations.supervisor.state import Lock, StartFailed
from tests.support.processes import alive, wait_until

FOR_EVER = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
DEMO = """
import asyncio, sys
from headrace_cli.demo import demo_run
async def main():
    async with demo_run.running_agent([sys.executable, "-S", "-c", "import time; time.sleep(600)"], {}) as process:
        print(process.pid, flush=True)
        await process.wait()
asyncio.run(main())
"""


async def test_the_agent_is_terminated_when_the_demo_ends() -> None:
    async with demo_run.running_agent(FOR_EVER, {}) as process:
        assert alive(process.pid)
    assert process.returncode == -15


async def test_it_ends_with_a_demo_that_is_cancelled() -> None:
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def demo() -> None:
        async with demo_run.running_agent(FOR_EVER, {}) as process:
            started.set_result(process.pid)
            await process.wait()

    task = asyncio.create_task(demo())
    pid = await asyncio.wait_for(started, 20)
    task.cancel()
    await asyncio.wait([task])
    assert not alive(pid)


def test_it_ends_with_a_demo_that_is_killed() -> None:
    demo = subprocess.Popen([sys.executable, "-c", DEMO], stdout=subprocess.PIPE, text=True)
    assert demo.stdout is not None
    pid = int(demo.stdout.readline())
    assert alive(pid)
    demo.kill()
    demo.communicate()
    wait_until(lambda: not alive(pid), 10, "the agent's end")


VERSION = "villager@0123456789abcdef"


class Registry:
    """Registry whose replicas load a version after a given number of seconds, or never."""

    def __init__(self, patch: pytest.MonkeyPatch, loads: int | None) -> None:
        self.calls: list[object] = []
        self._loads = loads
        self._clock = 0.0
        patch.setattr(runner, "ModelRegistry", lambda _url, who: self)
        patch.setattr(catalog, "store_folder", self._stored)
        patch.setattr(catalog, "register", self._register)
        patch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: self._clock, sleep=self._sleep))

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_error: object) -> None:
        self.calls.append("closed")

    def model(self, _name: str) -> SimpleNamespace:
        loaded = self._loads is not None and self._clock >= self._loads
        return SimpleNamespace(champion=VERSION if loaded else None)

    def pin(self, name: str, version: str, *, reason: str) -> None:
        self.calls.append(("pin", name, version, self.model(name).champion, bool(reason)))

    async def _stored(self, folder: Path, name: str, base: object, environ: dict[str, str]) -> SimpleNamespace:
        self.calls.append(("stored", folder, name, base, environ))
        return SimpleNamespace(version=VERSION)

    def _register(self, _api: object, _manifest: object, *, label: str, serve: bool, why: str) -> None:
        self.calls.append(("register", label, serve, bool(why)))

    def _sleep(self, _seconds: float) -> None:
        self._clock += 1.0


async def test_it_is_registered_served_and_pinned_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(monkeypatch, loads=5)
    assert await runner.register_opponents("url", "villager", Path("/base"), "v1.0", {"A": "b"}) == VERSION
    assert registry.calls == [
        ("stored", Path("/base"), "villager", None, {"A": "b"}),
        ("register", "v1.0", True, True),
        ("pin", "villager", VERSION, VERSION, True),
        "closed",
    ]


async def test_one_that_never_serves_ends_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(monkeypatch, loads=None)
    with pytest.raises(StartFailed, match=f"{VERSION} does not serve after 120 s"):
        await runner.register_opponents("url", "villager", Path("/base"), "v1.0", {})
    assert registry.calls[-1] == "closed"
    assert "pin" not in [call[0] for call in registry.calls]  # type: ignore[index]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> DemoRun:
    for name in ("_FIRST_VERSION_S_MAX", "_LAST_AUDIT_S_MAX"):
        monkeypatch.setattr(demo_run, name, 0.02)
    nothing: Any = SimpleNamespace()
    return DemoRun(
        nothing, nothing, StackAddress("127.0.0.1:1", "http://127.0.0.1:1"), nothing, Watch("127.0.0.1:1", "m")
    )


async def test_no_first_version_is_a_sentence(played: DemoRun) -> None:
    with pytest.raises(StartFailed, match=r"no version took over and was measured within 0\.02 s; .*`headrace logs`"):
        await played._wait_first_version(lambda: True)


async def test_a_last_version_that_is_not_measured_is_named(played: DemoRun) -> None:
    played.watch.champions.append("m@1")
    with pytest.raises(StartFailed, match=r"m@1 was not measured within 0\.02 s"):
        await played._wait_last_audit()


@pytest.mark.parametrize(("enough_gain", "measured"), [(0.5, ["m@0", "m@2"]), (0.1, ["m@0", "m@1"])])
async def test_the_last_version_has_all_tasks_unless_the_goal_was_reached_earlier(
    monkeypatch: pytest.MonkeyPatch, played: DemoRun, enough_gain: float, measured: list[str]
) -> None:
    versions: list[str] = []
    audits = {name: VersionAudit(name, score, datetime.now(UTC)) for name, score in (("m@0", 0.4), ("m@1", 0.6))}

    async def ready(*_: object) -> None: ...

    async def measure(_run: DemoRun, version: str) -> str:
        versions.append(version)
        return version

    async def work(run: DemoRun, *_: object) -> dict[str, int]:
        run.watch.champions.append("m@1")
        return {"requests": 1, "failed_requests": 0}

    async def settle(_wait: object, watch: Watch, _timeout_s: float) -> None:
        watch.champions.append("m@2")

    for name, replacement in (("_wait_first_version", ready), ("_wait_last_audit", ready), ("_measure", measure)):
        monkeypatch.setattr(DemoRun, name, replacement)
    monkeypatch.setattr(DemoRun, "_run_agent", work)
    monkeypatch.setattr(demo_run.TrainingWait, "until_settled", settle)
    goal = recipe.Goal(traffic_s_max=1.0, enough_gain=enough_gain, gain_min=0.0, swaps_min=1)
    run: Any = replace(
        played,
        recipe=SimpleNamespace(model="m"),  # type: ignore[arg-type]
        options=SimpleNamespace(goal=goal),  # type: ignore[arg-type]
        reporter=console_reporter.ConsoleReporter(Console(file=io.StringIO())),
        watch=Watch("127.0.0.1:1", "m", scores=audits, champions=["m@0"]),
    )
    await run.run_with_gate()
    assert versions == measured


FOLDER = Path(__file__).parents[3] / "examples" / "email_agent"


@pytest.mark.parametrize("wanted_s", [None, 7.0])
@pytest.mark.parametrize("short", [True, False])
def test_how_long_the_agent_works(monkeypatch: pytest.MonkeyPatch, short: bool, wanted_s: float | None) -> None:
    seen: list[Any] = []

    def play(_recipe: object, options: Any, **_how: object) -> bool:
        seen.append(options.goal)
        return True

    monkeypatch.setattr(command, "_play_one_seed", play)
    command.demo(FOLDER, short=short, traffic_s=wanted_s)
    demo_recipe = recipe.read(FOLDER)
    stop_condition = demo_recipe.short if short else demo_recipe.goal
    changes = {} if wanted_s is None else {"traffic_s_max": wanted_s, "tasks": 0}
    assert seen == [stop_condition.model_copy(update=changes)]


EXAMPLES = sorted(path.parent for path in FOLDER.parent.glob("*/demo.toml"))


@pytest.mark.parametrize("folder", EXAMPLES, ids=lambda folder: folder.name)
def test_work_of_an_example_is_bounded_by_its_tasks_and_not_by_time(folder: Path) -> None:
    example = recipe.read(folder)
    for goal in (example.goal, example.short):
        assert goal.traffic_s_max >= 3600, "for a run that hangs"
        bounds = {"{row}"} if example.rows is not None else {"{tasks}"}
        assert bounds <= set(example.agent)
        assert example.rows is not None or goal.tasks > 0


def test_data_of_an_earlier_demo_is_removed_unless_it_still_runs(tmp_path: Path) -> None:
    data_dir = tmp_path / "demo"
    lock = Lock(data_dir)
    lock.take()
    (data_dir / "scorer.db").touch()
    with pytest.raises(UsageError, match="Headrace is up already"):
        command._empty_data_dir(data_dir)
    assert (data_dir / "scorer.db").exists()
    lock.release()
    assert command._empty_data_dir(data_dir) == data_dir
    assert not data_dir.exists()


def test_keep_running_is_refused_with_several_seeds() -> None:
    with pytest.raises(UsageError, match="--keep-running: has no effect with --seeds"):
        command.demo(FOLDER, seeds=2, keep_running=True)


def test_end_names_three_commands_with_the_path_of_the_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.argv", ["/opt/my env/bin/headrace", "demo"])
    demo_recipe = recipe.read(FOLDER)
    command._print_next(demo_recipe, Options(0, demo_recipe.goal, tmp_path, tmp_path, tmp_path, {}))
    commands = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert len(commands) == 3
    assert all("'/opt/my env/bin/headrace' " in line for line in commands)
    assert commands[0].startswith(f"  PYTHONPATH={FOLDER.parent} ")


def test_end_in_a_container_names_commands_of_the_host(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_file = (FOLDER.parents[1] / "deploy/all.Dockerfile").read_text(encoding="utf-8")
    (run,) = re.findall(rf'{command.CONTAINER}="([^"]+)"', recipe_file)
    (workdir,) = re.findall(r"(?m)^WORKDIR (/srv\S+)", recipe_file)
    assert f"-v headrace-demo:{workdir}/{command.DATA_DIR.parent}" in run
    assert f" {workdir}/{command.DATA_DIR.parent} " in recipe_file, "the image's user owns the folder of the volume"
    assert f"\n{run} headrace demo" in (FOLDER.parents[1] / "deploy/README.md").read_text(encoding="utf-8")
    monkeypatch.setenv(command.CONTAINER, run)
    demo_recipe = recipe.read(FOLDER)
    command._print_next(demo_recipe, Options(0, demo_recipe.goal, command.DATA_DIR, Path(), Path(), {}))
    serve, *others = [line[2:] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert serve.startswith(
        f"{run} --network host -e PYTHONPATH={FOLDER.parent} headrace up --data-dir .headrace/demo "
    )
    assert all(line.startswith(f"{run} headrace ") for line in others)


def test_without_the_demo_distribution_the_checkout_is_used_or_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(FOLDER.parents[1])
    assert (recipe.default_folder() / "demo.toml").is_file()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"pip install 'headrace\[local\]'"):
        recipe.default_folder()


@pytest.mark.parametrize("gain", [0.5, 0.0])
def test_report_is_printed_while_the_services_run_and_they_stop_afterwards(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, gain: float
) -> None:
    demo_recipe, running = recipe.read(FOLDER), []

    class Services:
        plan = SimpleNamespace(bus="127.0.0.1:1")

        def __init__(self, *_: object, **_options: object) -> None: ...

        def start(self) -> None:
            running.append(True)

        def wait_up(self) -> SimpleNamespace:
            return SimpleNamespace(services={"console": SimpleNamespace(url="http://127.0.0.1:3")})

        def url(self, _name: str) -> str:
            return "http://127.0.0.1:2"

        def stop(self) -> None:
            running.clear()

    async def run_on_stack(*_: object) -> Report:
        return Report(
            before=0.4, after=0.4 + gain, versions=(), turns_captured=1, turns_trained=1, turns_waiting=0,
            turns_dropped={}, failed_requests=0, requests=1, swaps=9, wall_s=1.0, traffic_s=1.0, seed=0,
        )  # fmt: skip

    async def interrupted() -> None:
        assert running
        output = capsys.readouterr().out
        assert "held-out success" in output
        assert output.count("console   http://127.0.0.1:3") == 2  # at the start, and beside the base URL

    monkeypatch.setattr(runner, "Supervisor", Services)
    monkeypatch.setattr(runner, "_build_base", lambda *_: "base")
    monkeypatch.setattr(runner, "run_on_stack", run_on_stack)
    monkeypatch.setattr(command, "_wait_for_interrupt", interrupted)
    options = Options(0, demo_recipe.goal, tmp_path / "data", tmp_path / "cache", tmp_path, {})
    path = tmp_path / "demo.json"
    assert command._play_one_seed(demo_recipe, options, keep_running=True, path=path) == (gain > 0)
    assert not running
    assert path.is_file()
    assert f"logs trainer --data-dir {tmp_path / 'data'}" in capsys.readouterr().out


@pytest.mark.parametrize(("tasks", "line"), [(1600, "12 of 1,600 tasks at most"), (0, "of 7,200 s at most")])
def test_progress_of_the_agent_counts_its_tasks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tasks: int, line: str
) -> None:
    monkeypatch.setattr(console_reporter, "ProgressDisplay", partial(ProgressDisplay, interval_s=0.01))
    output, summary = io.StringIO(), tmp_path / "agent.json"
    assert demo_run._finished_tasks(summary) == 0
    summary.write_text('{"tasks":')
    assert demo_run._finished_tasks(summary) == 0
    summary.write_text('{"tasks": 12}')
    reporter = console_reporter.ConsoleReporter(Console(file=output, width=200))
    with reporter.agent_progress(tasks, 7200.0) as update:
        update(Watch("bus", "m"), demo_run._finished_tasks(summary))
        wait_until(lambda: line in output.getvalue(), 20, "a line of the log")
