"""Tests of the supervisor with minimal services: start order, restarts, refusals, and no orphaned processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace_operations.supervisor import Limits, StartFailed, Supervisor, read
from headrace_operations.supervisor.process import BACKGROUND_NICENESS
from headrace_operations.supervisor.state import NotRunning, request_health, supervisor_silence_s
from tests.support.processes import alive, is_open, wait_until
from tests.unit.cli.doubles import Dummies

FAST = Limits(first_pause_s=0.05, pause_max_s=0.2, stop_timeout_s=5.0, health_interval_s=0.02)
Make = Callable[..., Supervisor]


@pytest.fixture
def dummies(tmp_path: Path) -> Dummies:
    folder = tmp_path / "modules"
    folder.mkdir()
    return Dummies(folder, "broker", "alpha", "beta")


@pytest.fixture
def make(dummies: Dummies, data_dir: Path) -> Iterator[Make]:
    """Yield a factory of supervisors, which are stopped after the test."""
    supervisors: list[Supervisor] = []

    def build(limits: Limits = FAST, **options: object) -> Supervisor:
        arguments = {"services": dummies.services, "environ": dummies.environ, "auto_ports": True, **options}
        supervisors.append(Supervisor(data_dir, limits=limits, **arguments))  # type: ignore[arg-type]
        return supervisors[-1]

    yield build
    for supervisor in supervisors:
        supervisor.stop()
    assert not any(alive(pid) for pid in dummies.pids), "something is left running"


def test_the_broker_first_and_the_broker_last(make: Make, dummies: Dummies, data_dir: Path) -> None:
    supervisor = make()
    supervisor.start()
    state = supervisor.wait_ready(20)
    assert dummies.starts[0] == "broker"
    assert sorted(dummies.starts[1:]) == ["alpha", "beta"]
    assert read(data_dir) == state == supervisor.state
    assert sorted(supervisor.pids.values()) == sorted(dummies.pids)
    assert (data_dir / "logs" / "alpha.log").read_text() == "alpha starts\n"
    supervisor.stop()
    assert sorted(dummies.lines("stops")[:2]) == ["alpha", "beta"]
    assert dummies.lines("stops")[2] == "broker"
    assert supervisor.wait(0)
    with pytest.raises(NotRunning, match="headrace up"):
        read(data_dir)


def test_a_background_service_leaves_the_processor_to_the_others(make: Make, dummies: Dummies) -> None:
    services = {**dummies.services, "beta": replace(dummies.services["beta"], is_background=True)}
    supervisor = make(services=services)
    supervisor.start()
    supervisor.wait_ready(20)
    own_priority = os.getpriority(os.PRIO_PROCESS, 0)
    niceness = {name: os.getpriority(os.PRIO_PROCESS, pid) - own_priority for name, pid in supervisor.pids.items()}
    assert niceness == {"broker": 0, "alpha": 0, "beta": min(BACKGROUND_NICENESS, 19 - own_priority)}


def test_every_service_gets_the_same_settings(make: Make, dummies: Dummies, data_dir: Path) -> None:
    supervisor = make(settings={"logs.level": "debug", "alpha.names": ["ü", "b"]})
    supervisor.start()
    supervisor.wait_ready(20)
    environs = [json.loads((dummies.folder / f"{name}.environ").read_text()) for name in dummies.services]
    assert environs[0] == environs[1] == environs[2]
    environ = environs[0]
    assert environ["HEADRACE_DATA_DIR"] == f'"{data_dir}"'
    assert environ["HEADRACE_LOGS__LEVEL"] == '"debug"'
    assert environ["HEADRACE_ALPHA__NAMES"] == '["ü", "b"]'
    assert environ["HEADRACE_BUS__ADDRESS"] == f'"{supervisor.state.bus}"'
    ports = [environ[f"HEADRACE_{name.upper()}__PORT"] for name in dummies.services]
    assert len({*ports, environ["HEADRACE_BROKER__KAFKA_PORT"]}) == 4


def test_a_killed_service_is_restarted_on_its_port(make: Make, dummies: Dummies) -> None:
    messages: list[str] = []
    supervisor = make(report=messages.append)
    supervisor.start()
    before = supervisor.wait_ready(20).services["alpha"]
    os.kill(supervisor.pids["alpha"], signal.SIGKILL)
    wait_until(lambda: supervisor.state.services["alpha"].restarts == 1, 10, "the restart")
    after = supervisor.wait_ready(20).services["alpha"]
    assert (after.port, after.restarts) == (before.port, 1)
    assert after.pid != before.pid
    assert messages == ["alpha ended (signal 9); starting it again in 0.05 s"]
    assert dummies.starts.count("beta") == dummies.starts.count("broker") == 1


def test_requests_wait_while_the_gateway_restarts(data_dir: Path, tmp_path: Path) -> None:
    dummies = Dummies(tmp_path, "gateway")
    limits = Limits(first_pause_s=1.0, stop_timeout_s=5.0, health_interval_s=0.02)
    supervisor = Supervisor(
        data_dir, services=dummies.services, environ=dummies.environ, auto_ports=True, limits=limits
    )
    with supervisor:
        port = supervisor.state.services["gateway"].port
        os.kill(supervisor.pids["gateway"], signal.SIGKILL)
        wait_until(lambda: supervisor.state.services["gateway"].status == "restarting", 10, "its death")
        with urllib.request.urlopen(f"{supervisor.url('gateway')}/health", timeout=20) as answer:
            assert answer.status == 200
        assert dummies.starts == ["gateway", "gateway"]
    assert not is_open(port)


def test_pauses_grow_while_a_service_keeps_dying(make: Make, dummies: Dummies) -> None:
    messages: list[str] = []
    dummies.tell("alpha", "crash")
    supervisor = make(Limits(first_pause_s=0.05, pause_max_s=0.15, health_interval_s=0.02), report=messages.append)
    supervisor.start()
    wait_until(lambda: len(messages) >= 4, 20, "four deaths")
    pauses = [
        f"alpha ended (exit status 1); starting it again in {pause} s" for pause in ("0.05", "0.1", "0.15", "0.15")
    ]
    assert messages[:4] == pauses
    assert supervisor.state.services["alpha"].status in ("restarting", "starting")


def test_wrong_settings_stop_everything_with_the_message(make: Make, dummies: Dummies) -> None:
    dummies.tell("beta", "refuse settings")
    supervisor = make()
    supervisor.start()
    with pytest.raises(StartFailed, match=r"beta refuses its settings: setting beta\.prot = 1: unknown"):
        supervisor.wait_ready(20)
    assert dummies.starts.count("beta") == 1, "starting it again cannot help"
    assert supervisor.pids == {}
    with pytest.raises(StartFailed):
        supervisor.wait(0)


def test_settings_that_become_wrong_stop_only_the_service_that_restarts(make: Make, dummies: Dummies) -> None:
    messages: list[str] = []
    supervisor = make(report=messages.append)
    supervisor.start()
    before = supervisor.wait_ready(20).services["beta"]
    dummies.tell("alpha", "refuse settings")
    os.kill(supervisor.pids["alpha"], signal.SIGKILL)
    wait_until(lambda: len(messages) > 2, 20, "two refusals")
    assert messages[1].startswith("alpha refuses its settings: setting alpha.prot = 1: unknown; starting it again in")
    dummies.tell("alpha", "")
    assert supervisor.wait_ready(20).services["beta"].pid == before.pid


@pytest.mark.parametrize(
    "error", [BlockingIOError(11, "no processes left"), FileNotFoundError(2, "no such interpreter"), "no threads left"]
)
def test_a_restart_that_the_system_refuses_is_tried_again(
    make: Make, dummies: Dummies, monkeypatch: pytest.MonkeyPatch, error: OSError | str
) -> None:
    messages: list[str] = []
    supervisor = make(report=messages.append)
    supervisor.start()
    before = supervisor.wait_ready(20).services["beta"]

    def refuse(*_arguments: object, **_options: object) -> None:
        raise RuntimeError(error) if isinstance(error, str) else error

    with monkeypatch.context() as patch:
        if isinstance(error, str):
            patch.setattr(supervisor._processes["alpha"].log, "follow", refuse)
        else:
            patch.setattr("headrace_operations.supervisor.process.subprocess.Popen", refuse)
        os.kill(supervisor.pids["alpha"], signal.SIGKILL)
        wait_until(lambda: len(messages) > 2, 20, "two tries")
    assert all("alpha cannot be started" in message for message in messages[1:3]), messages
    assert supervisor.wait_ready(20).services["beta"].pid == before.pid


@pytest.mark.parametrize("part", ["head", "body"])
def test_an_answer_that_arrives_byte_by_byte_ends_in_time(part: str) -> None:
    """The supervisor checks all services in turn, so one slow answer would leave the others unwatched."""
    begin, rest = (b"", b"HTTP/1.1 200 OK\r\n\r\n") if part == "head" else (b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 99)

    def drip(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(begin)
            for byte in rest:
                connection.sendall(bytes([byte]))
                time.sleep(0.1)

    with socket.create_server(("127.0.0.1", 0)) as server:
        threading.Thread(target=drip, args=(server,), daemon=True).start()
        began_s = time.monotonic()
        assert request_health(f"http://127.0.0.1:{server.getsockname()[1]}", 0.3) is None
        assert time.monotonic() - began_s < 1.5


def test_a_state_file_that_disappears_while_it_is_read_means_that_nothing_runs(
    make: Make, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    monkeypatch.setattr(Path, "exists", lambda _path: True)
    with pytest.raises(NotRunning, match="has just stopped"):
        read(data_dir)


def test_a_service_that_lacks_something_is_up_and_not_ready(make: Make, dummies: Dummies) -> None:
    dummies.tell("alpha", "unready")
    supervisor = make()
    supervisor.start()
    state = supervisor.wait_up(20)
    assert (state.services["alpha"].status, state.services["alpha"].lacks) == ("unready", ("model",))
    assert state.services["beta"].status in ("unready", "ready")
    with pytest.raises(StartFailed, match=r"after 0\.1 s alpha is not ready \(it lacks model\)"):
        supervisor.wait_ready(0.1)
    assert supervisor.pids == {}


def test_a_service_that_never_answers_is_named_with_its_last_words(make: Make, dummies: Dummies) -> None:
    dummies.tell("alpha", "never answer")
    supervisor = make()
    supervisor.start()
    wait_until(lambda: supervisor.state.services["beta"].status == "ready", 20, "the other one")
    wait_until(lambda: supervisor._processes["alpha"].log.tail, 20, "its last words")
    with pytest.raises(StartFailed, match=r"after 0\.1 s alpha does not answer \(alpha starts\)"):
        supervisor.wait_up(0.1)


def test_services_that_wait_for_the_bus_are_not_blamed(make: Make, dummies: Dummies) -> None:
    dummies.tell("broker", "never answer")
    supervisor = make()
    supervisor.start()
    wait_until(lambda: supervisor._processes["broker"].log.tail, 20, "its last words")
    supervisor._processes["broker"].log.tail.append('{"event": "disk_full", "error": "disk: no space left on /data"}')
    log_line = (
        r"after 0\.1 s broker does not answer \(disk: no space left on /data\); alpha, beta did not start before that$"
    )
    with pytest.raises(StartFailed, match=log_line):
        supervisor.wait_up(0.1)


def test_a_service_that_ignores_sigterm_is_killed_in_time(make: Make, dummies: Dummies) -> None:
    dummies.tell("alpha", "ignore SIGTERM")
    supervisor = make(Limits(stop_timeout_s=0.5, health_interval_s=0.02))
    supervisor.start()
    supervisor.wait_ready(20)
    supervisor.stop()
    assert dummies.lines("stops") == ["beta", "broker"]


def test_child_processes_of_a_dead_service_are_killed(make: Make, dummies: Dummies) -> None:
    dummies.tell("alpha", "leave a child")
    supervisor = make()
    supervisor.start()
    supervisor.wait_ready(20)
    wait_until(lambda: dummies.lines("child"), 10, "the child")
    child = int(dummies.lines("child")[0])
    os.kill(supervisor.pids["alpha"], signal.SIGKILL)
    wait_until(lambda: not alive(child), 10, "the child's end")


def test_a_second_one_is_refused(make: Make, data_dir: Path) -> None:
    make().start()
    with pytest.raises(UsageError, match=f"up already in {data_dir}"):
        make()


OWNER = """
import sys, pathlib
from headrace_operations.supervisor import Supervisor
from headrace_runtime.services import ServiceInfo
services = {"alpha": ServiceInfo(module="dummy_alpha", summary="")}
supervisor = Supervisor(pathlib.Path(sys.argv[1]), services=services, auto_ports=True)
supervisor.start()
supervisor.wait_ready(20)
print(supervisor.pids["alpha"], flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child's life to its parent's")
def test_no_process_survives_a_killed_supervisor_and_the_next_one_starts(
    make: Make, dummies: Dummies, data_dir: Path
) -> None:
    command = [sys.executable, "-c", OWNER, str(data_dir)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=dict(dummies.environ)) as owner:
        assert owner.stdout is not None
        service = int(owner.stdout.readline())
        assert read(data_dir).pid == owner.pid
        owner.kill()
    wait_until(lambda: not alive(service), 10, "the service's end")
    with pytest.raises(NotRunning):
        read(data_dir)
    make().start()


def test_an_unwritable_state_file_stops_no_service(make: Make, dummies: Dummies, data_dir: Path) -> None:
    messages: list[str] = []
    supervisor = make(report=messages.append)
    (data_dir / "run" / "state.json").mkdir()
    supervisor.start()
    assert supervisor.wait_ready(20).ready
    (data_dir / "run" / "state.json").rmdir()
    wait_until(lambda: (data_dir / "run" / "state.json").is_file(), 10, "the next attempt")
    assert len(messages) == 1
    assert "cannot write the state file" in messages[0]


# hung is not dead

WATCHFUL = Limits(
    first_pause_s=0.05, stop_timeout_s=5.0, health_interval_s=0.02, health_timeout_s=0.3, hung_s=1.0, hang_timeout_s=3.0
)


@pytest.mark.parametrize("notification", ["", "answer only"])
def test_a_stopped_service_is_hung_then_killed_and_started_again(
    make: Make, dummies: Dummies, notification: str
) -> None:
    messages: list[str] = []
    dummies.tell("alpha", notification)
    supervisor = make(WATCHFUL, report=messages.append)
    supervisor.start()
    before = supervisor.wait_ready(20).services["alpha"]
    assert before.pid is not None
    os.kill(before.pid, signal.SIGSTOP)
    wait_until(lambda: supervisor.state.services["alpha"].status == "hung", 20, "it is seen to hang")
    assert alive(before.pid)
    assert supervisor.state.services["beta"].status == "ready", "nobody else is touched"
    wait_until(lambda: supervisor.state.services["alpha"].restarts == 1, 20, "the restart")
    after = supervisor.wait_ready(20).services["alpha"]
    assert (after.port, after.pid != before.pid, alive(before.pid)) == (before.port, True, False)
    words = [line.split(" for ")[0] for line in messages]
    assert words[:2] == ["alpha hangs: no sign of life"] * 2
    assert "killing process" in messages[1]
    assert messages[2] == "alpha ended (signal 9); starting it again in 0.05 s"
    assert dummies.starts.count("beta") == dummies.starts.count("broker") == 1


def test_a_loop_that_is_stuck_hangs_too(make: Make, dummies: Dummies) -> None:
    supervisor = make(WATCHFUL)
    supervisor.start()
    supervisor.wait_ready(20)
    with pytest.raises(OSError, match="timed out"):
        urllib.request.urlopen(f"{supervisor.url('alpha')}/stuck", timeout=0.1)
    wait_until(lambda: supervisor.state.services["alpha"].restarts == 1, 20, "the restart")
    assert supervisor.wait_ready(20).ready


def test_a_service_that_answers_again_in_time_is_not_killed(make: Make, dummies: Dummies) -> None:
    supervisor = make(Limits(health_interval_s=0.02, health_timeout_s=0.3, hung_s=0.5, hang_timeout_s=600))
    supervisor.start()
    pid = supervisor.wait_ready(20).services["alpha"].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: supervisor.state.services["alpha"].status == "hung", 20, "it is seen to hang")
    os.kill(pid, signal.SIGCONT)
    assert supervisor.wait_ready(20).services["alpha"].pid == pid
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: supervisor.state.services["alpha"].status == "hung", 20, "it is seen to hang again")
    supervisor.stop()
    assert not alive(pid), "what hangs is not asked to stop"


def test_the_supervisor_itself_is_seen_to_look(make: Make, data_dir: Path) -> None:
    supervisor = make()
    supervisor.start()
    supervisor.wait_ready(20)
    state = data_dir / "run" / "state.json"
    os.utime(state, (0, 0))
    assert supervisor_silence_s(data_dir) > 1e6
    wait_until(lambda: supervisor_silence_s(data_dir) < 1e6, 20, "the next look")


def test_stopping_before_anything_is_ready(make: Make, dummies: Dummies) -> None:
    dummies.tell("broker", "never answer")
    supervisor = make()
    supervisor.start()
    wait_until(lambda: dummies.starts, 10, "the broker")
    supervisor.stop()
    assert dummies.starts == ["broker"]
