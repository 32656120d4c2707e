"""Tests of `headrace up` with real services: the table of services, real requests, kill -9, and a clean end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import Client
from headrace_operations.supervisor import NotRunning, RunState, read
from tests.support.processes import alive, wait_until

HEADRACE = str(Path(sys.executable).with_name("headrace"))
SERVICES = ("broker", "gateway", "registry")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("up") / "data"


@pytest.fixture(scope="module")
def up(folder: Path) -> Iterator[subprocess.Popen[str]]:
    chosen = [word for name in SERVICES for word in ("--only", name)]
    command = [HEADRACE, "up", "--data-dir", str(folder), "--auto-ports", *chosen, "--set", "registry.poll_s=0.5"]
    environ = {**os.environ, "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ)
    yield process
    process.kill()
    process.wait()


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HEADRACE, *arguments], capture_output=True, text=True, check=False, timeout=60)


def run_of(folder: Path) -> RunState | None:
    try:
        return read(folder)
    except NotRunning:
        return None


def test_one_table_says_where_everything_is(up: subprocess.Popen[str], folder: Path) -> None:
    assert up.stdout is not None
    lines: list[str] = []
    while "Ctrl-C" not in (line := up.stdout.readline()):
        assert line, "it ended: " + "".join(lines)
        lines.append(line)
    state = read(folder)
    text = "".join(lines)
    for name in SERVICES:
        row = next(line for line in lines if line.strip().startswith(name))
        assert state.services[name].url in row
    assert f"base_url  {state.base_url}" in text
    assert "no model is served yet" in text
    assert "trainer is not started" in text


def test_a_second_one_is_refused(up: subprocess.Popen[str], folder: Path) -> None:
    process = headrace("up", "--data-dir", str(folder), "--auto-ports")
    assert (process.returncode, "Headrace is up already" in process.stderr) == (2, True)


def test_what_the_client_sends_is_on_the_bus(up: subprocess.Popen[str], folder: Path, tmp_path: Path) -> None:
    state = read(folder)
    name = "run 7/%2F?#"  # all of it has to be quoted in a path
    with Client(state.base_url or "") as client, client.session(name, task_id="t") as session:
        receipt = session.feedback(0.5, context={"expected": "42"})
        session.feedback(0.5, context={"expected": "42"}, feedback_id=receipt)
    path = tmp_path / "feedback.jsonl"
    process = headrace("replay", "events", "feedback", "--session", name, "-d", str(folder), "-o", str(path))
    assert process.returncode == 0, process.stderr
    assert "feedback: 2 events of 2 records in the range" in process.stderr
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({line["id"] for line in lines}) == 1, "sent twice, one feedback"
    assert lines[0]["event"]["value"] == 0.5
    assert lines[0]["event"]["task_id"] == "t"
    ends = headrace("replay", "events", "session-ends", "--session", name, "-d", str(folder))
    assert json.loads(ends.stdout)["event"]["session_id"] == name


def test_status_with_an_account_that_adds_up(up: subprocess.Popen[str], folder: Path) -> None:
    process = headrace("status", "-d", str(folder), "--json")
    assert process.returncode == 0, process.stderr
    status = json.loads(process.stdout)
    assert set(status["run"]["services"]) == set(SERVICES)
    assert status["run"]["services"]["registry"]["status"] == "ready"
    assert status["run"]["services"]["gateway"]["lacks"] == ["routing"]
    assert status["account"]["captured"] == 0
    assert status["models"] == []
    assert "listening" in headrace("logs", "registry", "-d", str(folder)).stdout


def test_a_killed_service_comes_back_where_it_was(up: subprocess.Popen[str], folder: Path) -> None:
    before = read(folder).services["registry"]
    assert before.pid is not None
    os.kill(before.pid, signal.SIGKILL)
    wait_until(lambda: _restarted(folder), 30, "the registry's second life")
    after = read(folder).services["registry"]
    assert (after.url, after.restarts) == (before.url, 1)


def _restarted(folder: Path) -> bool:
    service = read(folder).services["registry"]
    return service.restarts == 1 and service.status == "ready"


def test_ctrl_c_ends_everything(up: subprocess.Popen[str], folder: Path) -> None:
    pids = [service.pid for service in read(folder).services.values() if service.pid]
    up.send_signal(signal.SIGINT)
    assert up.wait(40) == 0
    assert not any(alive(pid) for pid in pids)
    assert run_of(folder) is None
