"""Options of `headrace demo` and the arguments of the demo that they set."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace_cli.commands import demo as command
from headrace_cli.demo import recipe, runner
from headrace_cli.demo.performance import Options
from headrace_cli.demo.report import Report
from headrace_operations.supervisor.state import Lock

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
    assert seen == [stop_condition.model_copy(update={"traffic_s_max": wanted_s or stop_condition.traffic_s_max})]


def test_data_of_an_earlier_demo_is_removed_unless_it_still_runs(tmp_path: Path) -> None:
    data_dir = tmp_path / "demo"
    lock = Lock(data_dir)
    lock.take()
    (data_dir / "scorer.db").touch()
    with pytest.raises(UsageError, match="Headrace is up already"):
        command._emptied(data_dir)
    assert (data_dir / "scorer.db").exists()
    lock.release()
    assert command._emptied(data_dir) == data_dir
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

        def wait_up(self) -> None: ...

        def url(self, _name: str) -> str:
            return "http://127.0.0.1:2"

        def stop(self) -> None:
            running.clear()

    async def perform(*_: object) -> Report:
        return Report(
            before=0.4, after=0.4 + gain, versions=(), turns_captured=1, turns_trained=1, turns_waiting=0,
            turns_dropped={}, failed_requests=0, requests=1, swaps=9, wall_s=1.0, traffic_s=1.0, seed=0,
        )  # fmt: skip

    async def interrupted() -> None:
        assert running
        assert "held-out success" in capsys.readouterr().out

    monkeypatch.setattr(runner, "Supervisor", Services)
    monkeypatch.setattr(runner, "_build_base", lambda *_: "base")
    monkeypatch.setattr(runner, "perform", perform)
    monkeypatch.setattr(command, "_interrupted", interrupted)
    options = Options(0, demo_recipe.goal, tmp_path / "data", tmp_path / "cache", tmp_path, {})
    path = tmp_path / "demo.json"
    assert command._play_one_seed(demo_recipe, options, keep_running=True, path=path) == (gain > 0)
    assert not running
    assert path.is_file()
    assert f"logs trainer --data-dir {tmp_path / 'data'}" in capsys.readouterr().out
