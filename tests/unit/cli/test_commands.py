"""Tests of `headrace` options, unsupported systems, `headrace connect`, the console link and the rollout chart.

`headrace connect` writes the gateway, the key and the model into the configuration of each agent. `headrace up` prints
the console address with its token only to a terminal, not to a log. A rollout is displayed as a text chart and a status
line.
"""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx2
import pytest
from typer.testing import CliRunner

from headrace import __version__
from headrace_cli.app import app
from headrace_cli.commands.connect import AGENTS
from headrace_cli.commands.rollouts import status_line
from headrace_cli.commands.shared import console
from headrace_cli.commands.up import print_summary
from headrace_cli.demo.console_reporter import ConsoleReporter
from headrace_operations import charts
from headrace_operations.supervisor.state import Lock, NotRunning, RunState, ServiceState
from headrace_operations.supervisor.state import read as read_state
from headrace_runtime import rollout_picture
from headrace_runtime.http import web
from headrace_runtime.settings.sections import Common, SecuritySettings, ServiceSettings
from headrace_schemas.http.registry_api import ChartPoint, RolloutState, ShadowState
from headrace_schemas.http.stack_access import make_token, take_login_token
from tests.unit.cli.test_cli import NOW, headrace
from tests.unit.client.test_manager import rollout


def test_version_is_that_of_the_client() -> None:
    assert headrace("--version") == (0, f"headrace {__version__}\n")


_WITHOUT_UNIX = """
import sys
for name in ("fcntl", "grp", "pwd", "resource", "termios"):
    sys.modules[name] = None  # as on Windows, where an import of them fails
{imports}
sys.platform = "win32"
sys.argv = ["headrace", "up"]
{run}
"""


@pytest.mark.parametrize(
    ("imports", "run", "status", "message"),
    [
        ("from headrace_cli.app import main", "main()", 2, "run on Linux, on macOS and in WSL; on Windows itself, use"),
        ("from headrace_scorer.__main__ import SERVICE", "SERVICE.main()", 1, "headrace scorer: services run on Linux"),
        ("from headrace import AsyncClient, Client", "Client('http://127.0.0.1:9').close()", 0, ""),
    ],
    ids=["command", "service", "client"],
)
def test_windows_gets_a_sentence_instead_of_a_traceback(imports: str, run: str, status: int, message: str) -> None:
    code = _WITHOUT_UNIX.format(imports=imports, run=run)
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (status, bool(message)), ended.stderr
    assert message in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train rows.jsonl", "rows.jsonl: ALGORITHM is missing; write for example `headrace train sft rows.jsonl`"),
        ("train topic:experiences", "ALGORITHM is missing; write for example `headrace train sft topic:experiences`"),
        ("train sft", "headrace train sft: SOURCE is missing; name files or folders of rows, or topic:experiences"),
        ("train no.toml", "recipe no.toml: cannot be read: No such file or directory; name an existing file"),
        ("trinity convert no.yaml", "no.yaml: cannot be read: No such file or directory; name a YAML file of Trinity"),
    ],
)
def test_missing_files_and_arguments_are_named(
    arguments: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, text = headrace(*arguments.split())
    assert status == 2
    assert message in text


def test_up_refuses_two_different_ports_of_the_gateway(tmp_path: Path) -> None:
    status, text = headrace("up", "--data-dir", str(tmp_path), "--port", "8100", "--set", "gateway.port=8200")
    assert status == 2
    assert "--port 8100: --set gateway.port=8200 differs; leave one of them out" in text


def connect(agent: str, *options: str) -> tuple[int, str]:
    arguments = ["connect", agent, "--base-url", "http://h:8000/v1/", "--api-key", "s3cret", *options]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    return result.exit_code, result.stdout if not result.exit_code else result.output


@pytest.mark.parametrize("agent", AGENTS)
def test_the_lines_name_gateway_key_and_model(agent: str) -> None:
    status, text = connect(agent, "--model", "my-agent")
    assert status == 0
    assert all(value in text for value in ("http://h:8000", "s3cret", "my-agent"))
    assert ("/v1" in text) == (agent != "claude-code"), "Anthropic's clients append /v1 themselves"


def test_codex_gets_toml_and_opencode_gets_json() -> None:
    settings = tomllib.loads(connect("codex", "--model", 'a"b')[1])
    assert settings["model"] == 'a"b'
    assert settings["model_providers"]["headrace"]["wire_api"] == "responses"
    provider = json.loads(connect("opencode", "--model", "m")[1])["provider"]["headrace"]
    assert provider["options"] == {"baseURL": "http://h:8000/v1", "apiKey": "s3cret"}


def test_an_unknown_agent_is_refused_with_the_known_ones() -> None:
    status, text = connect("nobody")
    assert status == 2
    assert "claude-code" in text


FILES = {
    "claude-code": ('{"env": {"FOO": "1", "ANTHROPIC_BASE_URL": "old"}, "theme": "dark"}', ("FOO", "theme")),
    "codex": (
        '# mine\nmodel = "o3"\napproval_policy = "never"\n'
        '[model_providers.headrace]\nbase_url = "old"\n\n[tui]\nbell = true\n',
        ("# mine", "approval_policy", "[tui]", "bell = true"),
    ),
    "opencode": ('{"provider": {"mine": {}}, "theme": "dark"}', ("mine", "theme")),
    "qwen-code": ("FOO=1\nOPENAI_BASE_URL=old\n", ("FOO=1",)),
    "aider": ("dark-mode: true\nopenai-api-base: old\n", ("dark-mode: true",)),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def path_of(agent: str, home: Path) -> Path:
    return home / AGENTS[agent].file.removeprefix("~/")


@pytest.mark.parametrize("agent", AGENTS)
def test_write_adds_the_lines_and_leaves_other_settings(home: Path, agent: str) -> None:
    before, other_settings = FILES[agent]
    file = path_of(agent, home)
    file.parent.mkdir(exist_ok=True)
    file.write_text(before)
    for _ in range(2):
        status, _ = connect(agent, "--model", "my-agent", "--write")
        assert status == 0
    after = file.read_text()
    assert all(text in after for text in (*other_settings, "http://h:8000", "my-agent"))
    assert "old" not in after
    assert after.count("http://h:8000") == 1, "a second time changes nothing"
    assert file.stat().st_mode & 0o077 == 0, "the file may hold a key"


@pytest.mark.parametrize("agent", AGENTS)
def test_write_creates_the_file(home: Path, agent: str) -> None:
    assert connect(agent, "--model", "m", "--write")[0] == 0
    assert "http://h:8000" in path_of(agent, home).read_text()


@pytest.mark.parametrize(
    ("agent", "content"),
    [
        ("opencode", "{ // a comment\n}"),
        ("opencode", "[]"),
        ("codex", "model = "),
        ("codex", 'notes = """\n[model_providers.headrace]\n"""\n'),
    ],
)
def test_write_refuses_a_file_that_it_cannot_merge(home: Path, agent: str, content: str) -> None:
    file = path_of(agent, home)
    file.parent.mkdir(exist_ok=True)
    file.write_text(content)
    status, text = connect(agent, "--write")
    assert status == 2
    assert "without --write" in " ".join(text.split())
    assert file.read_text() == content


def test_write_keeps_the_earlier_file(home: Path) -> None:
    file = path_of("aider", home)
    file.write_text("dark-mode: true\n")
    for _ in range(2):
        connect("aider", "--write")
    assert file.with_name(f"{file.name}.before-headrace").read_text() == "dark-mode: true\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def summary(data_dir: Path, output: io.StringIO, monkeypatch: pytest.MonkeyPatch, **fields: object) -> str:
    """Return the lines that `headrace up` prints to `output` for a stack with a registry."""
    registry = ServiceState(status="ready", pid=1, url="http://127.0.0.1:8003", port=8003, log="x.log", since=NOW)
    state = RunState.model_validate(
        {"pid": 1, "data_dir": str(data_dir), "started_at": NOW, "bus": "127.0.0.1:1", "token_is_key": True}
        | {"services": {"registry": registry}, **fields}
    )
    monkeypatch.setattr(sys, "stdout", output)
    print_summary(state)
    return output.getvalue()


@pytest.fixture
def token(data_dir: Path) -> str:
    (data_dir / "run").mkdir(parents=True)
    return make_token(data_dir)


def test_a_terminal_gets_an_address_with_the_token(data_dir: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = summary(data_dir, Terminal(), monkeypatch)
    assert f"http://headrace:{token}@127.0.0.1:8003/v1/models" in text


def test_a_terminal_gets_an_address_that_logs_in_to_the_console_once(
    data_dir: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del token
    service = ServiceState(status="ready", pid=1, url="http://127.0.0.1:8040", port=8040, log="x.log", since=NOW)
    printed = summary(data_dir, Terminal(), monkeypatch, services={"console": service})
    match = re.search(r"http://127\.0\.0\.1:8040/login\?token=([\w-]+)", printed)
    assert match is not None
    assert take_login_token(data_dir, match[1])
    assert not take_login_token(data_dir, match[1])
    logged = summary(data_dir, io.StringIO(), monkeypatch, services={"console": service})
    assert "http://127.0.0.1:8040" in logged
    assert "token=" not in logged


def test_the_demo_prints_the_address_that_logs_in_to_its_console(
    data_dir: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    del token
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    ConsoleReporter(console()).print_console("http://127.0.0.1:8040", data_dir)
    match = re.search(r"http://127\.0\.0\.1:8040/login\?token=([\w-]+)", terminal.getvalue())
    assert match is not None
    assert take_login_token(data_dir, match[1])
    monkeypatch.setattr(sys, "stdout", log := io.StringIO())
    ConsoleReporter(console()).print_console("http://127.0.0.1:8040", data_dir)
    assert "token=" not in log.getvalue()
    assert f"headrace console --data-dir {data_dir}" in log.getvalue().replace("\n", "")


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS"])
def test_a_log_gets_no_token(data_dir: Path, token: str, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "1")
    text = summary(data_dir, io.StringIO(), monkeypatch)
    assert token not in text
    assert "run/token" in text.replace("\n", "")


def test_no_address_is_printed_that_the_token_does_not_open(
    data_dir: Path, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    states: list[dict[str, object]] = [{"token_is_key": False, "token_is_password": True}, {"services": {}}]
    for fields in states:
        assert token not in summary(data_dir, Terminal(), monkeypatch, **fields)


async def test_the_printed_address_opens_the_page(data_dir: Path, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    common = Common(data_dir=data_dir, security=SecuritySettings.model_validate({"internal_key": token}))
    async with web.serve(web.app({}, common=common), ServiceSettings()) as port, httpx2.AsyncClient() as client:
        page = f"127.0.0.1:{port}/metrics"
        assert (await client.get(f"http://{page}")).status_code == 401
        assert (await client.get(f"http://headrace:{token}@{page}")).status_code == 200


def watched(points: int) -> RolloutState:
    """Return a rollout with `points` chart points, whose confidence interval narrows around -0.2."""
    chart_points = tuple(
        ChartPoint(units=number, metrics={"reward": (-0.2, -0.2 - 2 / number, -0.2 + 2 / number)})
        for number in range(1, points + 1)
    )
    return rollout("canary").model_copy(update={"chart": chart_points})


@pytest.mark.parametrize("points", [1, 30, 500])
def test_the_chart_has_its_size_zero_and_the_margin(points: int) -> None:
    lines = charts.draw_lines(watched(points), "reward", width=60, height=15)
    assert len(lines) == 17
    assert max(map(len, lines)) <= 10 + max(60, len(lines[-1]))
    assert sum("●" in line for line in lines) >= 1
    assert any(line.strip().startswith("0 ┤") for line in lines)
    assert any(line.strip().startswith("-0.1 ┤") for line in lines) or points == 1, "the margin, once there is room"


def test_where_less_is_better_the_margin_is_above() -> None:
    worse = rollout("canary").model_copy(update={"margins": {"loops": 0.1}, "higher_is_better": {"loops": False}})
    assert rollout_picture.margin(worse, "loops") == 0.1
    assert rollout_picture.margin(watched(1), "reward") == -0.1
    assert rollout_picture.margin(watched(1), "latency") is None


def test_the_chart_without_a_reading_is_a_message() -> None:
    assert charts.draw_lines(rollout("canary"), "reward") == [
        "reward: no session has reached the age at which it is read"
    ]
    assert "not read yet" in status_line(rollout("canary"), None)


def test_the_end_is_in_the_line() -> None:
    assert status_line(rollout("rolled_back"), "success").endswith("success +0.200 in [+0.100, +0.300]  so")


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    assert rollout_picture.picture(watched(40), "reward", tmp_path / "it.png")
    assert (tmp_path / "it.png").stat().st_size > 1000


def shadowed(**fields: object) -> RolloutState:
    state = {"prompts": 44, "read": 41, "pairs": 40, "spoke": 30, "tokens": 9, "effective": 28.4, "mean_weight": 1.0}
    return rollout("canary").model_copy(
        update={"shadow_units": 40, "shadow": ShadowState.model_validate({**state, **fields})}
    )


def test_shadow_results_are_printed_with_their_interval() -> None:
    state = shadowed(judged=0.1, difference=0.05, lower=-0.02, upper=0.12, ended={"candidate: other_call": 1})
    text = "\n".join(charts.summarize_shadow(state))
    assert "41 of 44 prompts answered by both versions, 40 judged pairs" in text
    assert "users: +0.050 in [-0.020, +0.120], 30 answers count as 28" in text
    assert "1 ended otherwise, candidate: other call" in text


def test_the_reason_of_a_refused_estimate_is_printed() -> None:
    lines = charts.summarize_shadow(
        shadowed(refused="no overlap: 30 answers count as 1.2", left_out={"the gateway answered 500": 3})
    )
    assert any("users: no estimate, no overlap" in line for line in lines)
    assert any("3 left out, the gateway answered 500" in line for line in lines)


def test_a_rollout_in_the_shadow_counts_prompts() -> None:
    going_on = rollout("shadow").model_copy(
        update={"shadow_units": 40, "statistics": {"shadow_units": 7.0}, "shadow": None}
    )
    assert "shadow  share" in status_line(going_on, None)
    assert "7/40 prompts" in status_line(going_on, None)
    assert charts.summarize_shadow(going_on) == ["shadow  7 of 40 prompts read"]
    assert charts.summarize_shadow(rollout("canary")) == []


def test_commands_read_headrace_toml_of_their_folder_unless_another_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for variable in ("HEADRACE_CONFIG", "HEADRACE_DATA_DIR"):
        monkeypatch.delenv(variable, raising=False)
    Path("headrace.toml").write_text('data_dir = "here"')
    Path("other.toml").write_text('data_dir = "other"')

    assert f"Headrace is not up in {tmp_path}/here" in headrace("status")[1]
    assert "headrace.toml: exists already" in headrace("config", "init")[1]
    monkeypatch.setenv("HEADRACE_CONFIG", "other.toml")
    assert f"Headrace is not up in {tmp_path}/other" in headrace("status")[1]
    monkeypatch.delenv("HEADRACE_CONFIG")
    Path("headrace.toml").write_text("[no.such")
    status, text = headrace("up")
    assert (status, "headrace.toml" in text) == (2, True), text
    status, text = headrace("up", "--config", "absent.toml")
    assert (status, "absent.toml" in text) == (2, True), text


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[" * 10_000, b'{"pid": 1e999}'])
def test_a_damaged_state_is_named(content: bytes, data_dir: Path) -> None:
    lock = Lock(data_dir)
    lock.take()
    (data_dir / "run" / "state.json").write_bytes(content)
    with pytest.raises(NotRunning, match=r"state\.json is damaged"):
        read_state(data_dir)
    lock.release()


def test_a_path_that_the_system_refuses_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, text = headrace("train", "x" * 5000)
    assert status == 1
    assert "xxx" in text
    assert "File name too long; name another path" in text
