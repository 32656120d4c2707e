"""Tests of what `headrace up` does with services: its plan of services and ports, refused configurations, and logs.

Logs stay bounded while they are written, and can be followed across a rotation. If the disk refuses writes, whole lines
are dropped and counted, and no writer blocks.
"""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest

from headrace.errors import UsageError
from headrace_cli.commands.logs import Tail
from headrace_operations.supervisor import plan as planning
from headrace_operations.supervisor.overrides import Overrides, parse_assignments
from headrace_operations.supervisor.process import LogFile
from headrace_operations.supervisor.state import failed_checks
from headrace_runtime.errors import SettingError
from headrace_runtime.services import ServiceInfo
from headrace_runtime.settings.table import override
from tests.support import packages
from tests.support.processes import free_port
from tests.unit.cli.test_cli import headrace

SERVICES = planning.installed()


def make(tmp_path: Path, text: str = "", environ: dict[str, str] | None = None, **options: object) -> planning.Plan:
    config = tmp_path / "headrace.toml"
    config.write_text(text)
    settings = options.pop("settings", {})
    overrides = Overrides(config, settings, environ or {})  # type: ignore[arg-type]
    arguments = {"auto_ports": True, **options}
    return planning.make(tmp_path / "data", overrides, SERVICES, **arguments)  # type: ignore[arg-type]


def names(plan: planning.Plan) -> set[str]:
    return {service.name for service in plan.services}


def test_judge_and_trainer_need_a_setting_of_theirs(tmp_path: Path) -> None:
    plan = make(tmp_path)
    assert names(plan) == SERVICES.keys() - {"judge", "trainer"}
    assert plan.left_out == {"judge": "judge.endpoint.base_url is not set", "trainer": "trainer.base is not set"}
    text = '[judge.endpoint]\nbase_url = "http://x/v1"\n[trainer]\nbase = "model"\n'
    assert names(make(tmp_path, text)) == SERVICES.keys()


@pytest.mark.parametrize("by", ["file", "environment", "settings"])
def test_no_broker_when_the_bus_is_elsewhere(tmp_path: Path, by: str) -> None:
    plan = make(
        tmp_path,
        '[bus]\naddress = "kafka:9092"\n' if by == "file" else "",
        {"HEADRACE_BUS__ADDRESS": "kafka:9092"} if by == "environment" else {},
        settings={"bus.address": "kafka:9092"} if by == "settings" else {},
    )
    assert "broker" not in names(plan)
    assert plan.left_out["broker"] == "bus.address = kafka:9092"
    assert plan.bus == "kafka:9092"


def test_only_and_without(tmp_path: Path) -> None:
    plan = make(tmp_path, only=("gateway", "trainer"))
    assert names(plan) == {"gateway", "trainer"}, "named on purpose: the service itself says what it lacks"
    assert plan.left_out["broker"] == "--only"
    assert "inference" not in names(make(tmp_path, without=("inference",)))
    with pytest.raises(
        UsageError, match=r"service 'gatway' is not installed; the installed services are broker, collector"
    ):
        make(tmp_path, without=("gatway",))


def test_ports_are_the_usual_ones_unless_they_are_set(tmp_path: Path) -> None:
    gateway, registry, kafka = free_port(), free_port(), free_port()
    text = f"[gateway]\nport = {gateway}\n[broker]\nkafka_port = {kafka}\n"
    plan = make(tmp_path, text, {"HEADRACE_REGISTRY__PORT": str(registry)}, only=("gateway", "registry", "broker"))
    ports = {service.name: service.port for service in plan.services}
    assert (ports["gateway"], ports["registry"], plan.bus) == (gateway, registry, f"127.0.0.1:{kafka}")
    assert plan.environ["HEADRACE_BUS__ADDRESS"] == f'"127.0.0.1:{kafka}"'
    assert plan.environ["HEADRACE_GATEWAY__PORT"] == str(gateway)
    assert plan.environ["HEADRACE_REGISTRY__GATE__BASE_URL"] == f'"http://127.0.0.1:{gateway}/v1"'


def test_automatic_ports_are_not_those_of_outgoing_connections(tmp_path: Path) -> None:
    """Automatic ports are outside the ephemeral range, because another process may take such a port first."""
    for _ in range(20):
        ports = [service.port for service in make(tmp_path).services]
        assert len(set(ports)) == len(ports)
        assert all(1024 < port < 32_768 for port in ports)


def test_a_gate_url_that_was_set_stays(tmp_path: Path) -> None:
    plan = make(tmp_path, '[registry.gate]\nbase_url = "http://lb/v1"\n')
    assert "HEADRACE_REGISTRY__GATE__BASE_URL" not in plan.environ


def test_a_used_port_is_named_with_its_remedy(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=rf"gateway\.port = {port}: address already in use; .*--auto-ports"):
            make(tmp_path, f"[gateway]\nport = {port}\n", auto_ports=False)


def test_the_remedy_for_a_used_port_is_not_auto_ports_again(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        with pytest.raises(UsageError, match=rf"set another port, for example --set gateway\.port={port + 1}$"):
            make(tmp_path, f"[gateway]\nport = {port}\n", auto_ports=True)


def test_two_services_cannot_have_one_port(tmp_path: Path) -> None:
    port = free_port()
    with pytest.raises(UsageError, match="another service has this port"):
        make(tmp_path, f"[gateway]\nport = {port}\n[registry]\nport = {port}\n")


def test_a_further_port_of_a_service_is_its_own(tmp_path: Path) -> None:
    port = free_port()
    text = f"[gateway]\ntrinity_port = {port}\n"
    assert make(tmp_path, text).environ["HEADRACE_GATEWAY__TRINITY_PORT"] == str(port)
    with pytest.raises(UsageError, match=rf"inference\.port = {port}: another service has this port"):
        make(tmp_path, f"{text}[inference]\nport = {port}\n")
    assert "HEADRACE_GATEWAY__TRINITY_PORT" not in make(tmp_path).environ


def test_services_that_listen_everywhere_are_called_on_loopback(tmp_path: Path) -> None:
    (gateway,) = make(tmp_path, '[gateway]\nhost = "0.0.0.0"\n', only=("gateway",)).services
    assert gateway.url == f"http://127.0.0.1:{gateway.port}"


def test_the_data_directory(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text('data_dir = "/from/file"\n')
    overrides = Overrides(config, {}, {})
    assert planning.data_dir_of(Path("/given"), overrides) == Path("/given")
    assert planning.data_dir_of(None, overrides) == Path("/from/file")
    assert planning.data_dir_of(None, Overrides(config, {}, {"HEADRACE_DATA_DIR": "/env"})) == Path("/env")
    assert planning.data_dir_of(None, Overrides(None, {}, {})) == Path(".headrace").absolute()


def test_assignments_are_toml_or_text() -> None:
    assert parse_assignments(["a.b=1", "c = true", 'd=["x", "y"]', "e=127.0.0.1:9092", "f="]) == {
        "a.b": 1,
        "c": True,
        "d": ["x", "y"],
        "e": "127.0.0.1:9092",
        "f": "",
    }
    with pytest.raises(UsageError, match=r"section\.key=value"):
        parse_assignments(["gateway.port"])


def test_settings_arrive_as_they_were_given() -> None:
    """Setting values reach a service unchanged through environment variables."""
    value = {"a": {"s": 'quo"te\\ ü\n'}, "n": 1.5, "b": False, "l": ["x", {"deep key": 2}]}
    overrides = Overrides(None, {"x.given": value}, {})
    table: dict[str, dict[str, object]] = {}
    override(table, "HEADRACE_X__GIVEN", overrides.environ["HEADRACE_X__GIVEN"])
    assert table["x"]["given"] == value == overrides.get("x.given")


def test_settings_are_read_as_services_read_them() -> None:
    """A variable may hold a whole section as TOML, and a secret that consists of digits stays a string."""
    environ = {"HEADRACE_BUS": '{address = "kafka:9092"}', "HEADRACE_SECURITY__INTERNAL_KEY": "0123"}
    overrides = Overrides(None, {}, environ)
    assert overrides.get("bus.address") == "kafka:9092"
    assert overrides.get("security.internal_key") == "0123"
    assert parse_assignments(["security.internal_key=0123"]) == {"security.internal_key": "0123"}


@pytest.mark.parametrize(("text", "message"), [("[x\n", "is not valid TOML"), (None, "No such file")])
def test_a_bad_file_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "c.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingError, match=message):
        Overrides(path, {}, {})


@pytest.mark.parametrize("name", SERVICES)
def test_the_announced_information_matches_the_service(name: str) -> None:
    info = SERVICES[name]
    start = import_module(f"{info.module}.__main__").SERVICE
    assert (start.name, start.summary) == (name, info.summary)
    assert start.settings.model_fields["port"].default == info.port
    assert (find_spec(f"{info.module}.migrations") is not None) == info.database


def test_roles_of_services_come_from_their_information(tmp_path: Path) -> None:
    """The roles of services come from `ServiceInfo`, not from service names."""
    services = {
        "log": ServiceInfo(module="m", summary="", is_bus=True),
        "front": ServiceInfo(module="m", summary="", is_gateway=True),
        "echo": ServiceInfo(module="m", summary="", gateway_setting="echo.url", needs_setting="echo.word"),
    }
    plan = planning.make(tmp_path, Overrides(None, {}, {}), services, auto_ports=True)
    assert {service.name: service.keeps_socket for service in plan.services} == {"log": False, "front": True}
    assert plan.left_out == {"echo": "echo.word is not set"}
    assert plan.bus == f"127.0.0.1:{plan.environ['HEADRACE_LOG__KAFKA_PORT']}"
    plan = planning.make(tmp_path, Overrides(None, {"echo.word": "x"}, {}), services, auto_ports=True)
    front = next(service for service in plan.services if service.name == "front")
    assert plan.environ["HEADRACE_ECHO__URL"] == f'"{front.url}/v1"'


def test_a_service_that_cannot_be_imported_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packages.install(tmp_path, "wreck", {"headrace.services": {"wreck": "no_such_wreck:INFO"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UsageError, match=r"wreck 1\.0 announces the service 'wreck' .*No module named 'no_such_wreck'"):
        planning.installed()


def test_a_service_may_have_an_interpreter_of_its_own(tmp_path: Path) -> None:
    """A symbolic link to an interpreter is not resolved, because the link selects the virtual environment."""
    link = tmp_path / "bin" / "python"
    link.parent.mkdir()
    link.symlink_to(sys.executable)
    plan = make(tmp_path, pythons=planning.parse_pythons([f"inference={link}"]))
    assert {service.name: service.python for service in plan.services if service.python != sys.executable} == {
        "inference": str(link)
    }


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("inference", "SERVICE=PATH"),
        ("=python", "SERVICE=PATH"),
        ("inference=nowhere/python", "is not an executable file"),
        ("inference=.", "is not an executable file"),
        (f"inferrence={sys.executable}", "service 'inferrence' is not installed"),
    ],
)
def test_a_wrong_interpreter_is_refused_before_anything_starts(tmp_path: Path, assignment: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make(tmp_path, pythons=planning.parse_pythons([assignment]))


def test_up_without_any_service_names_the_extra_to_install(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no Headrace service is installed .* pip install 'headrace\[local\]'"):
        planning.make(tmp_path, Overrides(None, {}, {}), {})


def write(log: LogFile, *lines: str) -> None:
    reader, writer = os.pipe()
    thread = log.follow(os.fdopen(reader, "rb"))
    with os.fdopen(writer, "w") as pipe:
        pipe.writelines(f"{line}\n" for line in lines)
    thread.join(10)
    assert not thread.is_alive()


def test_rotation_keeps_whole_lines_and_a_bound(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "x.log", bytes_max=100, backups=2)
    lines = [f"line {number:04}" for number in range(50)]  # ten bytes each, with their end
    write(log, *lines)
    files = [tmp_path / "logs" / name for name in ("x.log.2", "x.log.1", "x.log")]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == sorted(path.name for path in files)
    assert all(path.stat().st_size <= 100 for path in files)
    assert "".join(path.read_text() for path in files).split("\n")[:-1] == lines[-30:]
    assert list(log.tail) == lines[-20:]


def test_the_next_life_goes_on_in_the_same_file(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "x.log", bytes_max=1000, backups=1)
    write(log, "first")
    write(log, "second")
    assert (tmp_path / "x.log").read_text() == "first\nsecond\n"


def test_a_failed_write_does_not_block(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "x.log", bytes_max=1000, backups=1)
    (tmp_path / "x.log").mkdir()
    write(log, *(f"line {number} {'x' * 1000}" for number in range(100)))  # more than a pipe holds
    assert log.tail[-1].startswith("line 99")


def test_following_across_a_rotation_loses_no_line(tmp_path: Path) -> None:
    path = tmp_path / "x.log"
    log = LogFile(path, bytes_max=60, backups=5)
    write(log, "one", "two")
    tail = Tail(path)
    assert tail.last_lines(1) == ["two"]
    assert list(tail.new_lines()) == []
    with path.open("a") as file:
        file.write("thr")
    assert list(tail.new_lines()) == []
    with path.open("a") as file:
        file.write("ee\n")
    assert list(tail.new_lines()) == ["three"]
    write(log, "four", "x" * 50, "five")
    assert list(tail.new_lines()) == ["four", "x" * 50, "five"]


def test_logs_of_all_services_by_time_and_readable(data_dir: Path) -> None:
    folder = data_dir / "logs"
    folder.mkdir(parents=True)
    entry = {"service": "alpha", "level": "warning", "event": "retrying", "time": "2026-01-01T10:00:02Z", "attempt": 1}
    (folder / "alpha.log").write_text(json.dumps(entry) + "\n")
    earlier = {"service": "beta", "level": "info", "event": "listening", "time": "2026-01-01T10:00:01Z", "port": 5}
    (folder / "beta.log").write_text("Traceback: not JSON\n" + json.dumps(earlier) + "\n")
    status, text = headrace("logs", data_dir=data_dir)
    assert status == 0
    assert text.splitlines() == [
        "beta  Traceback: not JSON",
        "beta  10:00:01 listening port=5",
        "alpha 10:00:02 retrying attempt=1",
    ]
    assert headrace("logs", "alpha", "--raw", data_dir=data_dir) == (0, json.dumps(entry) + "\n")
    assert len(headrace("logs", "-n", "1", data_dir=data_dir)[1].splitlines()) == 2


def test_the_error_for_an_unknown_service_lists_the_known_ones(data_dir: Path) -> None:
    (data_dir / "logs").mkdir(parents=True)
    (data_dir / "logs" / "alpha.log").touch()
    status, text = headrace("logs", "beta", data_dir=data_dir)
    assert (status, "it has the logs of: alpha" in text) == (2, True)


def test_lines_lost_to_a_full_disk_are_counted(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "x.log", 10_000, 1)
    log.write(b"one\n")
    refusal = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(LogFile, "_append", side_effect=refusal):
        log.write(b"two\n")
        log.write(b"three\n")
    log.write(b"four\n")
    assert log.path.read_text().splitlines() == [
        "one",
        f"headrace: 2 lines were lost here: disk: no space left on device on {tmp_path}/logs",
        "four",
    ]


def test_an_incomplete_line_is_removed(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "x.log", 10_000, 1)
    log.write(b"one\n")
    real = io.FileIO.write

    class Short(io.FileIO):
        def write(self, data: object) -> int:
            return real(self, bytes(data)[:2])  # type: ignore[call-overload]

    with mock.patch("builtins.open", lambda path, mode, **_: Short(path, mode.replace("b", ""))):
        log.write(b"two\n")
    log.write(b"three\n")
    lines = log.path.read_text().splitlines()
    assert (lines[0], lines[-1], len(lines)) == ("one", "three", 3)


def test_files_and_folders_are_for_their_owner(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "logs" / "x.log", 100, 1)
    for _ in range(20):
        log.write(b"0123456789\n")
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "logs").iterdir()}
    assert modes == {"x.log": 0o600, "x.log.1": 0o600}
    assert (tmp_path / "logs").stat().st_mode & 0o777 == 0o700


def test_a_failed_check_is_reported_with_its_reason() -> None:
    page = b'{"checks": {"bus": true, "capture": false, "routing": false}, "reasons": {"capture": "disk: full"}}'
    assert failed_checks(page) == ("routing", "disk: full")
    assert failed_checks(b'{"checks": {"bus": false}}') == ("bus",)
    assert failed_checks(b"nonsense") == ()
