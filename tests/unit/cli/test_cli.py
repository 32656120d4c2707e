"""Tests of the command line: help, completion, errors in one line, and the output of each command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from typer.models import CommandInfo
from typer.testing import CliRunner

from headrace_cli.app import app
from headrace_operations.supervisor.state import Lock, RunState, ServiceState
from headrace_runtime.services import SERVICES
from headrace_schemas import ModelEvent
from headrace_schemas.http.registry_api import ModelList, ModelState, VersionList, VersionState
from tests.support.processes import free_port
from tests.unit.cli.doubles import HttpFake

NOW = datetime(2026, 1, 1, tzinfo=UTC)
_NAMES_BY_GROUP = {
    "": "up demo status logs console feedback train evaluate mirror controls connect", "sessions": "where",
    "models": "list show promote rollback withdraw pin unpin pause resume register import export serve unserve alias "
    "tag note notes retire collect audit diff why stop pull push", "trinity": "convert config",
    "replay": "events plan run resume offer list remove", "config": "init check reference schema",
    "dead-letters": "list show retry discard", "rollouts": "list show watch begin stop promote rollback report",
}  # fmt: skip
COMMANDS = [f"{group} {name}".split() for group, names in _NAMES_BY_GROUP.items() for name in names.split()]


def headrace(*arguments: str, data_dir: Path | None = None) -> tuple[int, str]:
    """Run `headrace` with `arguments`, and return its exit status and its combined stdout and stderr."""
    environ = {"HEADRACE_DATA_DIR": str(data_dir) if data_dir else None, "COLUMNS": "200"}
    result = CliRunner().invoke(app, list(arguments), env=environ)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.fixture
def http() -> Iterator[HttpFake]:
    fake = HttpFake()
    yield fake
    fake.stop()


@pytest.fixture
def up(data_dir: Path, http: HttpFake) -> Iterator[Path]:
    """Yield a data directory in which Headrace seems to run: `http` serves both the gateway and the registry."""
    lock = Lock(data_dir)
    lock.take()
    service = ServiceState(status="ready", pid=1, url=http.url, port=1, log="x.log", since=NOW)
    services = {"gateway": service, "registry": service}
    RunState(pid=1, data_dir=str(data_dir), started_at=NOW, bus="127.0.0.1:1", services=services).write(data_dir)
    yield data_dir
    lock.release()


HELP = """
import sys
from headrace_cli.app import main
sys.argv = ["headrace", "--help"]
try:
    main()
except SystemExit:
    heavy = ("httpx2", "pydantic", "aiokafka", "asyncio", "headrace_schemas.values.base", "headrace_runtime")
    print("MODULES", len(sys.modules))
    print("HEAVY", [name for name in heavy if name in sys.modules])
"""


def test_help_is_quick_because_it_imports_little() -> None:
    process = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    modules, heavy = process.stdout.splitlines()[-2:]
    assert heavy == "HEAVY []"
    assert int(modules.removeprefix("MODULES ")) < 500, "it takes 400 now, most of them the terminal's"


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_has_examples(command: list[str]) -> None:
    status, text = headrace(*command, "--help")
    assert status == 0
    assert "Examples" in text
    assert f"headrace {' '.join(command)}" in text


def test_no_command_is_untested() -> None:
    registered: set[tuple[str, ...]] = {(_name(info),) for info in app.registered_commands}
    for group in app.registered_groups:
        assert group.typer_instance is not None
        registered |= {(str(group.name), _name(info)) for info in group.typer_instance.registered_commands}
    assert registered == {tuple(command) for command in COMMANDS}


def _name(command: CommandInfo) -> str:
    assert command.callback is not None
    return command.name or command.callback.__name__


@pytest.mark.parametrize(
    ("words", "expected"),
    [("headrace ", {"up", "status", "models"}), ("headrace up --only ga", {"gateway"}),
     ("headrace replay events traj", {"trajectories"}), ("headrace config reference j", {"judge"})],
)  # fmt: skip
def test_completion(words: str, expected: set[str]) -> None:
    environ = {"_HEADRACE_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    result = CliRunner().invoke(app, [], prog_name="headrace", env=environ)
    assert expected <= set(result.output.split())


def test_the_installed_command_completes() -> None:
    environ = {**os.environ, "_HEADRACE_COMPLETE": "complete_bash", "COMP_WORDS": "headrace s", "COMP_CWORD": "1"}
    script = Path(sys.executable).with_name("headrace")
    process = subprocess.run([str(script)], env=environ, capture_output=True, text=True, check=False)
    assert sorted(process.stdout.split()) == ["sessions", "status"]


def test_commands_without_a_running_headrace_fail_in_one_line(data_dir: Path) -> None:
    for command in (["status"], ["models", "list"], ["feedback", "1", "--session", "s"], ["replay", "events", "turns"]):
        status, text = headrace(*command, data_dir=data_dir)
        assert (status, text.strip()) == (
            1,
            f"headrace: Headrace is not up in {data_dir}; start it with `headrace up`, or name another --data-dir",
        )


def test_wrong_usage_has_its_own_status(data_dir: Path) -> None:
    status, text = headrace("up", "--set", "nonsense", data_dir=data_dir)
    assert (status, "section.key=value" in text) == (2, True)
    assert headrace("up", "--only", "gatway", data_dir=data_dir)[0] == 2
    assert headrace("nonsense")[0] == 2


# feedback


def test_feedback(up: Path, http: HttpFake) -> None:
    http.answer("POST", "/v1/feedback", {}, status=202)
    status, text = headrace(
        "feedback", "0.5", "--session", "s", "--comment", "c", "--context", "expected=42", "--end", data_dir=up
    )
    assert status == 0
    (body,) = http.bodies
    feedback_id = body.pop("feedback_id")
    assert f"accepted as {feedback_id}" in text
    assert body == {
        "session_id": "s", "value": 0.5, "source": "feedback", "comment": "c", "context": {"expected": 42},
        "ends_session": True, "withdrawn": False,
    }  # fmt: skip


def test_feedback_that_is_refused(up: Path, http: HttpFake) -> None:
    http.answer("POST", "/v1/feedback", {"error": {"message": "says nothing", "code": "invalid"}}, status=400)
    assert headrace("feedback", "--session", "s", data_dir=up) == (1, "headrace: says nothing (400, invalid)\n")


# models

OLD, NEW = "m@0123456789ab", "m@0fffffffffff"


def decision(version: str, name: str, reason: str | None = None, **numbers: float) -> ModelEvent:
    fields = {"time": NOW, "decision_id": "d", "model": "m", "version": version, "decision": name, "reason": reason}
    return ModelEvent.model_validate({**fields, "statistics": numbers})


def version(name: str, state: str, *decisions: ModelEvent, step: int = 0) -> VersionState:
    fields = {"id": name, "model": "m", "lineage": "main", "step": step, "state": state, "registered_at": NOW}
    return VersionState.model_validate({**fields, "decisions": decisions})


@pytest.fixture
def registry(up: Path, http: HttpFake) -> HttpFake:
    model = ModelState(id="m", champion=OLD, candidate=NEW, anchor=OLD, trials=2, revision=3)
    compared = decision(
        NEW, "rejected", "inferior to the champion", difference=-0.25, standard_error=0.125, tasks=8,
        anchor_difference=-0.5,
    )  # fmt: skip
    measured = decision(OLD, "evaluated", score=0.5, score_standard_error=0.05, tasks=96)
    versions = (version(NEW, "rejected", compared, step=1), version(OLD, "promoted", measured))
    http.answer("GET", "/v1/models", json.loads(ModelList(data=(model,)).model_dump_json()))
    http.answer("GET", "/v1/models/m", json.loads(model.model_dump_json()))
    http.answer("GET", "/v1/models/m/versions", json.loads(VersionList(data=versions).model_dump_json()))
    return http


def test_models_list_and_show(registry: HttpFake, up: Path) -> None:
    status, text = headrace("models", "list", data_dir=up)
    assert status == 0
    assert text.split()[-8:] == ["m", OLD, "-", NEW, OLD, "2", "-", "3"]
    status, text = headrace("models", "show", "m", data_dir=up)
    assert status == 0
    rows = {line.split()[0]: line.split(maxsplit=1)[1].rstrip() for line in text.splitlines() if "@" in line}
    assert " ".join(rows[NEW].split()) == "1 candidate - 8 -0.250 ± 0.125 -0.500 inferior to the champion"
    assert rows[OLD].split() == ["0", "champion", "0.500", "±", "0.050", "-", "-", "-"]
    assert json.loads(headrace("models", "list", "--json", data_dir=up)[1])[0]["champion"] == OLD
    assert json.loads(headrace("models", "show", "m", "--json", data_dir=up)[1])[0]["id"] == NEW


def test_promote_by_the_first_letters(registry: HttpFake, up: Path) -> None:
    registry.answer("POST", "/v1/models/m/promote", {"id": "m", "revision": 3}, status=202)
    assert headrace("models", "promote", "m", "0f", "--force", data_dir=up)[0] == 0
    assert registry.bodies == [{"version": NEW, "force": True}]
    status, text = headrace("models", "promote", "m", "0", data_dir=up)
    assert (status, "matches 2 versions of m" in text) == (2, True)


def test_promote_and_wait_for_a_no(registry: HttpFake, up: Path) -> None:
    registry.answer("POST", "/v1/models/m/promote", {"id": "m", "revision": 3}, status=202)
    later = version(NEW, "rejected", decision(NEW, "rejected", "x"), decision(NEW, "rejected", "still inferior"))
    before = registry.answers["GET", "/v1/models/m/versions"]
    after = json.loads(VersionList(data=(later, version(OLD, "promoted"))).model_dump_json())
    registry.sequence("GET", "/v1/models/m/versions", [before, before, before, (200, after)])
    status, text = headrace("models", "promote", "m", NEW, "--wait", data_dir=up)
    assert (status, "still inferior" in text) == (1, True)


def test_rollback_and_withdraw(registry: HttpFake, up: Path) -> None:
    registry.answer("POST", "/v1/models/m/rollback", {"id": "m", "revision": 4, "champion": OLD})
    registry.answer("POST", "/v1/models/m/withdraw", {"id": "m", "revision": 5})
    status, text = headrace("models", "rollback", "m", "--reason", "why", data_dir=up)
    assert (status, OLD in text) == (0, True)
    assert headrace("models", "withdraw", "m", NEW, data_dir=up)[0] == 0
    assert registry.bodies == [{"reason": "why"}, {"version": NEW, "reason": ""}]


def test_pin_and_pause(registry: HttpFake, up: Path) -> None:
    for word in ("pin", "unpin", "pause", "resume"):
        registry.answer("POST", f"/v1/models/m/{word}", {"id": "m", "revision": 4, "champion": OLD})
    status, text = headrace("models", "pin", "m", data_dir=up)
    assert (status, text) == (0, f"m is pinned to {OLD}\n"), "a registry that says less is understood"
    registry.answer("POST", "/v1/models/m/pin", {"id": "m", "revision": 4, "champion": OLD, "pinned": NEW})
    status, text = headrace("models", "pin", "m", "0f", "--reason", "why", data_dir=up)
    assert (status, text) == (0, f"m is pinned to {NEW}\n")
    for word in ("unpin", "pause", "resume"):
        status, text = headrace("models", word, "m", "--reason", word, data_dir=up)
        assert (status, text.startswith("m ")) == (0, True)
    assert registry.bodies == [
        {"version": None, "reason": ""}, {"version": NEW, "reason": "why"},
        {"reason": "unpin"}, {"reason": "pause"}, {"reason": "resume"},
    ]  # fmt: skip


def test_holds_are_printed(registry: HttpFake, up: Path) -> None:
    model = {"id": "m", "champion": OLD, "pinned": OLD, "paused": True, "revision": 3}
    registry.answer("GET", "/v1/models", {"object": "list", "data": [model]})
    registry.answer("GET", "/v1/models/m", model)
    for command in ("list", "show m"):
        text = headrace("models", *command.split(), data_dir=up)[1]
        assert f"pinned to {OLD}, paused" in " ".join(text.split())


def test_a_refusal_of_the_registry_is_shown(registry: HttpFake, up: Path) -> None:
    refusal = {"error": {"message": "no previous version", "code": "no_previous"}}
    registry.answer("POST", "/v1/models/m/rollback", refusal, status=409)
    assert headrace("models", "rollback", "m", data_dir=up) == (1, "headrace: no previous version (409, no_previous)\n")


# status


def test_status_without_the_account(registry: HttpFake, up: Path) -> None:
    status, text = headrace("status", "--no-account", data_dir=up)
    assert status == 0
    assert "gateway" in text
    assert OLD in text
    assert f"base_url {registry.url}/v1" in text
    status_json = json.loads(headrace("status", "--no-account", "--json", data_dir=up)[1])
    assert status_json["run"]["services"]["registry"]["status"] == "ready"
    assert status_json["models"][0]["candidate"] == NEW
    assert status_json["account"] is None
    reason = f"no replica serves the champion {OLD}: replica r1: probe refused [0.5]"
    unserved = ModelState(id="m", champion=OLD, revision=3, trouble=reason)
    registry.answer("GET", "/v1/models", json.loads(ModelList(data=(unserved,)).model_dump_json()))
    text = headrace("status", "--no-account", data_dir=up)[1]
    assert " ".join(text.split()).startswith(f"model m is not served: {reason}"), "it comes first"


def test_status_checks_running_services(http: HttpFake, data_dir: Path) -> None:
    lock = Lock(data_dir)
    lock.take()
    with socket.create_server(("127.0.0.1", 0)) as hung:
        port = hung.getsockname()[1]
        service = ServiceState(status="ready", pid=1, url=http.url, port=1, log="x.log", since=NOW)
        silent = service.model_copy(update={"url": f"http://127.0.0.1:{port}"})
        services = {"scorer": service, "collector": silent}
        RunState(pid=77, data_dir=str(data_dir), started_at=NOW, bus="-", services=services).write(data_dir)
        failing = {"id": "function:concise", "outcomes": {"failed": 12, "scored": 3}, "failing": 12,
                   "last_error": "KeyError: 'expected' [rewards.py:7]"}  # fmt: skip
        fine = {"id": "function:right", "outcomes": {"scored": 15}, "later": "unknown to us"}
        http.answer("GET", "/sources", {"data": [failing, fine]})
        status, text = headrace("status", "--no-account", data_dir=data_dir)
        words = " ".join(text.split())
        assert status == 0
        assert "collector ready no answer in 3 s" in words
        assert "scorer ready yes" in words
        assert (
            "function:concise fails (12 times in a row; 12 failed, 3 scored), the last error: KeyError: 'expected'"
            in words
        )
        assert "[rewards.py:7]" in words
        assert "function:right" not in words
        assert "supervisor (pid 77)" not in words
        status_json = json.loads(headrace("status", "--no-account", "--json", data_dir=data_dir)[1])
        assert status_json["alive"] == {"scorer": "yes", "collector": "no answer in 3 s"}
        assert [source["id"] for source in status_json["sources"]] == ["function:concise", "function:right"]
        os.utime(data_dir / "run" / "state.json", (0, 0))
        words = " ".join(headrace("status", "--no-account", data_dir=data_dir)[1].split())
        assert "the supervisor (pid 77) has not checked for" in words
    lock.release()


# config


def test_config_check_names_the_service_that_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three = {name: SERVICES.get(name) for name in ("registry", "gateway", "judge")}
    monkeypatch.setattr("headrace_operations.supervisor.plan.installed", lambda: three)
    path = tmp_path / "c.toml"
    path.write_text("[registry]\nprot = 1\n")
    status, text = headrace("config", "check", str(path))
    assert status == 1
    assert "setting registry.prot = 1: unknown; did you mean 'port'?" in text
    assert text.count("unknown") == 1, "the other does not mind"
    assert "not started: judge.endpoint.base_url is not set" in text


GATE = """
import json, sys
print(json.dumps({"gate": ["a"], "audit": ["b"]}), flush=True)
for line in sys.stdin:
    print(json.dumps(json.loads(line) | {"score": 0.5}), flush=True)
"""
CHECKED = """
data_dir = "{folder}/data"
[broker]
port = {ports[0]}
kafka_port = {ports[1]}
[scorer]
port = {ports[2]}
functions = ["{folder}/rewards.py:score"]
[registry]
port = {ports[3]}
gate = {{ command = ["{{python}}", "{folder}/gate.py"] }}
"""


def test_config_check_applies_the_checks_of_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = {name: SERVICES.get(name) for name in ("broker", "scorer", "registry")}
    monkeypatch.setattr("headrace_operations.supervisor.plan.installed", lambda: chosen)
    ports = [free_port() for _ in range(4)]
    path = tmp_path / "c.toml"
    path.write_text(CHECKED.format(folder=tmp_path, ports=ports))
    (tmp_path / "rewards.py").write_text("def score(trajectory):\n    return 1.0\n")
    (tmp_path / "gate.py").write_text(GATE)
    status, text = headrace("config", "check", str(path))
    assert (status, text.split().count("ok")) == (0, 4), text
    assert not (tmp_path / "data").exists(), "nothing was started"

    (tmp_path / "rewards.py").write_text("def score(weather):\n    return 1.0\n")
    (tmp_path / "gate.py").write_text("import nothing_of_that_name")
    (tmp_path / "data").touch()
    with socket.create_server(("127.0.0.1", ports[2])):
        status, text = headrace("config", "check", str(path))
    words = " ".join(text.split())
    assert status == 1
    assert "parameter weather" in words
    assert "No module named 'nothing_of_that_name'" in words
    assert words.count("setting data_dir =") == 1, "once, though all mind"
    assert f"scorer.port = {ports[2]}" in words


def test_config_check_explains_the_migration_of_an_old_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_operations.supervisor.plan.installed", lambda: {"registry": SERVICES.get("registry")})
    path = tmp_path / "c.toml"
    path.write_text('[registry.gate]\ncommand = ["{python}", "gate.py", "{model}", "{base_url}"]\n')
    status, text = headrace("config", "check", str(path))
    words = " ".join(text.split())
    assert status == 1
    assert "registry.gate.command" in words
    assert "names {model}: a program is started once for all versions that are compared" in words
    assert "docs/gate.md" in words


def test_config_reference_of_one_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_operations.supervisor.plan.installed", lambda: {"registry": SERVICES.get("registry")})
    assert headrace("config", "reference", "registry", "-o", str(tmp_path / "r.toml")) == (0, "")
    assert "#port = 8020" in (tmp_path / "r.toml").read_text()
    assert headrace("config", "reference", "nobody")[0] == 2
    assert headrace("config", "schema", "-o", str(tmp_path / "s.json")) == (0, "")
    assert '"additionalProperties": false' in (tmp_path / "s.json").read_text()
    for command in ("reference", "schema"):
        status, text = headrace("config", command, "-o", str(tmp_path / "no" / "file"))
        assert status == 2
        assert "cannot be written (No such file or directory); name a file in an existing folder" in text
