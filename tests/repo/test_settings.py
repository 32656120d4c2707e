"""Tests of setting names in harnesses, of settings' tiers, and of the environment variables of user programs.

Some harnesses run only once for each release. Pages show the few settings that users set with the descriptions of the
services.
"""

from __future__ import annotations

import ast
import asyncio
import json
import random
import re
import sys
import tomllib
from collections.abc import Awaitable, Callable
from importlib import import_module
from pathlib import Path

import jsonschema
import pytest
from typer.testing import CliRunner, Result

from headrace_cli.app import app
from headrace_cli.demo import demo_run
from headrace_cli.demo import runner as demo_runner
from headrace_cli.demo.recipe import Goal, Recipe
from headrace_operations import settings_reference
from headrace_operations.jobs.checking import list_gate_tasks
from headrace_operations.settings_reference import Described, as_json_schema, as_toml, describe_settings
from headrace_operations.supervisor.plan import installed
from headrace_registry.gate.gate import Gate
from headrace_registry.rollouts.settings import ShadowSettings
from headrace_registry.settings import GateSettings
from headrace_registry.shadow.gateway_client import ToolProgram
from headrace_runtime.process.programs import INHERITED, program_environment
from headrace_runtime.settings.reference import describe
from headrace_runtime.settings.sections import Common, complete
from headrace_schemas import FunctionCall
from headrace_scorer.functions.outcomes import CallRequest
from headrace_scorer.functions.process import FunctionPool
from headrace_scorer.settings import ScorerSettings
from headrace_trainer.trinity_learner.learner import TrinityProcess
from tests.repo.deployments import ROOT
from tests.support import tiny_model
from tests.support.presence import draw_seed
from tests.support.processes import wait_until
from tests.support.turns import closed

FOLDERS = ("tests/attack", "tests/chaos", "tests/compose", "tests/support", "benchmarks", "examples", "deploy", "docs")
"""Tests that each `make test` runs notice it themselves, and some name a wrong setting on purpose."""
ENDINGS = (".py", ".yml", ".yaml", ".md", ".toml")
ALONE = ("docker-compose.yml", "Makefile", "README.md")
NAME = re.compile(r"\b(?:HEADRACE_)?([A-Z]+(?:__[A-Z0-9]+(?:_[A-Z0-9]+)*)+)\b")
"""As the environment has it: two underscores between a section and a setting."""
PASSED = "PASSED_ON_BY_NAME"
SECRETS = (
    "HEADRACE_SECURITY__INTERNAL_KEY", "HEADRACE_JUDGE__ENDPOINT__API_KEY", "HEADRACE_DATABASE__URL",
    "HEADRACE_BUS__PASSWORD", "OPENAI_API_KEY", "ANTHROPIC_API_KEY", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS", "AZURE_CLIENT_SECRET", "GITHUB_TOKEN", "HF_TOKEN",
    "WANDB_API_KEY", "RAY_AUTH_TOKEN", "PGPASSWORD", "HTTP_PROXY", "https_proxy", "SSH_AUTH_SOCK", "KUBECONFIG",
    "LC_SECRET", "PYTHON_KEYRING_TOKEN", "PATH_TO_KEY", "NCCL_TOKEN", "LISTEN_FDS", "LIVENESS_FD", "DATABASE_URL",
)  # fmt: skip
"""Names of secrets as shells and deployments have them, and some that begin like names that are passed on."""
PRINTING = """
import json, os, pathlib
pathlib.Path({path!r}).write_text(json.dumps(dict(os.environ)))
"""
NAMED = """
import json, sys
print(json.dumps({"gate": ["a"], "audit": ["b"]}), flush=True)
sys.stdin.read()
"""
TOOLS = """
import json, sys
for line in sys.stdin:
    print(json.dumps({"id": json.loads(line)["id"], "result": ""}), flush=True)
"""
Start = Callable[[Path, Path], Awaitable[None]]


def setting_names() -> set[str]:
    models = {"": Common}
    for name, info in installed().items():
        models[f"{name}."] = complete(import_module(f"{info.module}.__main__").SERVICE.settings)
    return {doc.name.upper().replace(".", "__") for prefix, model in models.items() for doc in describe(model, prefix)}


def test_harnesses_examples_and_docs_name_settings_that_there_are() -> None:
    files = [ROOT / name for name in ALONE]
    for folder in FOLDERS:
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in ENDINGS]
    settings = setting_names()
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in NAME.findall(path.read_text())
        if name not in settings
    }
    assert not unknown, sorted(unknown)


def test_a_renamed_setting_is_noticed() -> None:
    assert [name for name in NAME.findall('service("scorer", SCORER__SETTLE_S=1)') if name not in setting_names()] == [
        "SCORER__SETTLE_S"
    ]


COMMON_MAX = 40


@pytest.fixture(scope="module")
def described() -> Described:
    return describe_settings(installed())


def test_few_settings_are_common(described: Described) -> None:
    tiers = [setting.tier for settings in described.values() for setting in settings]
    assert set(tiers) == {"common", "tuning", "limits"}
    assert tiers.count("common") <= COMMON_MAX


def test_the_page_names_the_common_ones(described: Described) -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    rows: dict[str, list[str]] = {}
    for setting in (setting for settings in described.values() for setting in settings):
        if setting.tier == "common" and not setting.shared:
            section, _, name = setting.name.rpartition(".")
            rows.setdefault(f"`[{section}]`" if section else "at the top", []).append(f"`{name}`")
    table = "\n".join(f"| {section} | {', '.join(names)} |" for section, names in rows.items())
    assert table in page, table


def test_a_section_stands_once_in_the_reference(described: Described) -> None:
    """Tiers only order settings inside a table, because TOML does not permit a table twice."""
    tables = re.findall(r"^\[[\w.]+\]$", as_toml(described), re.MULTILINE)
    assert len(set(tables)) == len(tables)


@pytest.fixture
def init(described: Described, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Result]:
    """Return a function that calls `headrace config init mine.toml` in `tmp_path`; the services are described once."""
    monkeypatch.setattr(settings_reference, "describe_settings", lambda _services: described)
    monkeypatch.chdir(tmp_path)
    return lambda *options: CliRunner().invoke(app, ["config", "init", "mine.toml", *options])


def test_init_writes_what_users_set_and_overwrites_nothing(init: Callable[..., Result], tmp_path: Path) -> None:
    results = [init("--base", "models/mine", "--model", "helper") for _ in range(2)]
    assert [result.exit_code for result in results] == [0, 2], results[0].output
    assert "mine.toml: exists already" in results[1].output
    text = (tmp_path / "mine.toml").read_text(encoding="utf-8")
    assert 'base = "models/mine"' in text.splitlines()
    assert 'model = "helper"' in text.splitlines()
    assert "#learning_rate = ..." in text
    assert "spool_bytes_max" not in text


def test_init_sets_what_follows_from_the_size_of_the_base(init: Callable[..., Result], tmp_path: Path) -> None:
    base = tiny_model.build(tmp_path / "base")
    result = init("--base", str(base))
    assert result.exit_code == 0, result.output
    settings = tomllib.loads((tmp_path / "mine.toml").read_text(encoding="utf-8"))["trainer"]
    assert settings["optimizer"] == {"learning_rate": 1e-4}
    assert settings["compute"] == {"pack_tokens": 4096}
    assert not settings["lora"]


def _uncommented(reference: str) -> dict[str, object]:
    """Return the committed reference as settings, with every commented default set."""
    lines = [re.sub(r"^#(?=[a-z]\w* = (?!\.\.\.$))", "", line) for line in reference.splitlines()]
    return tomllib.loads("\n".join(lines))


def test_schema_accepts_every_default_and_refuses_unknown_names_and_wrong_types(described: Described) -> None:
    schema = json.loads(json.dumps(as_json_schema(described)))
    validator = jsonschema.Draft202012Validator(schema)
    validator.check_schema(schema)
    defaults = _uncommented((ROOT / "deploy" / "headrace.toml").read_text(encoding="utf-8"))
    assert len(defaults) > 8, "the sections of the services are there"
    assert [error.message for error in validator.iter_errors(defaults)] == []
    wrong_files: list[dict[str, object]] = [
        {"gatway": {}}, {"gateway": {"prot": 8000}}, {"gateway": {"port": "many"}}, {"bus": 1},
    ]  # fmt: skip
    assert [wrong for wrong in wrong_files if validator.is_valid(wrong)] == []
    assert validator.is_valid({"gateway": {"port": 8000}, "trainer": {"base": "models/base"}})


def _program(folder: Path, out: Path, rest: str) -> Path:
    (path := folder / "program.py").write_text(PRINTING.format(path=str(out)) + rest)
    return path


async def _start_gate(folder: Path, out: Path) -> None:
    command = (sys.executable, str(_program(folder, out, NAMED)))
    async with Gate(GateSettings(command=command, environment=(PASSED,))).session():
        pass


async def _read_tasks_of_gate(folder: Path, out: Path) -> None:
    command = [sys.executable, str(_program(folder, out, NAMED))]
    list_gate_tasks(command, "http://g/v1", program_environment((PASSED,)))


async def _start_tools(folder: Path, out: Path) -> None:
    path = _program(folder, out, TOOLS)
    settings = {"read_only_tools": ("t",), "tools_command": (sys.executable, str(path)), "tools_environment": (PASSED,)}
    tools = ToolProgram(ShadowSettings.model_validate(settings))
    try:
        await tools.call(FunctionCall(name="t", arguments="{}"))
    finally:
        await tools.stop()


async def _start_reward_function(folder: Path, out: Path) -> None:
    path = _program(folder, out, "\ndef score():\n    return 1.0\n")
    pool = FunctionPool(ScorerSettings(functions=(f"{path}:score",), function_environment=(PASSED,)))
    try:
        await pool.reload()
        assert (await pool.call(CallRequest(function="score"), closed().to_json())).value == 1.0
    finally:
        await pool.close()


async def _start_trinity(folder: Path, out: Path) -> None:
    path = _program(folder, out, "")
    process = TrinityProcess([sys.executable, str(path)], folder / "job.yaml", folder / "log", (PASSED,))
    try:
        await asyncio.to_thread(wait_until, lambda: process.ended, 60, "the program has ended")
    finally:
        process.close()


def _recipe(folder: Path, out: Path, rest: str) -> Recipe:
    goal, command = Goal(traffic_s_max=1, gain_min=0, swaps_min=0), ("{python}", str(_program(folder, out, rest)))
    return Recipe(
        title="t", model="m", config=Path("c"), base=command, agent=command, measure=command, checks=command,
        goal=goal, short=goal, environment=(PASSED,), folder=folder,
    )  # fmt: skip


async def _start_demo_checks(folder: Path, out: Path) -> None:
    recipe = _recipe(folder, out, "")
    assert not demo_runner.run_recipe_checks(recipe.command("checks", {}), demo_run.command_environment(recipe))


async def _build_demo_base(folder: Path, out: Path) -> None:
    assert demo_runner._build_base(_recipe(folder, out, f"\nprint({str(folder)!r})\n"), {}) == str(folder)


KINDS: tuple[Start, ...] = (
    _start_gate, _read_tasks_of_gate, _start_tools, _start_reward_function, _start_trinity,
    _start_demo_checks, _build_demo_base,
)  # fmt: skip


@pytest.mark.parametrize("start", KINDS, ids=lambda start: start.__name__.strip("_"))
async def test_a_users_program_sees_no_secret(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = draw_seed()
    rng = random.Random(seed)
    made_up = ["".join(rng.choices("ABCDEFGHIJKLMNOPQRSTUVWXYZ_abcxyz", k=rng.randint(2, 24))) for _ in range(100)]
    near = [f"{name}{rng.choice(('_KEY', '2', '_', 'S'))}" for name in sorted(INHERITED)]
    planted = {name: rng.randbytes(12).hex() for name in {*SECRETS, *made_up, *near} - INHERITED - {PASSED}}
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(PASSED, "yes")
    await start(tmp_path, out := tmp_path / "environment.json")
    environment = json.loads(out.read_text())
    assert not [name for name, value in environment.items() if value in planted.values()]
    assert environment[PASSED] == "yes"
    assert environment["PATH"], "programs are found"


OURS = {
    "packages/cli/src/headrace_cli/commands/trinity.py",  # the trainer's converter
    "packages/operations/src/headrace_operations/replay/program.py",  # services that read lines, and the trainer
    "packages/operations/src/headrace_operations/settings_reference.py",  # services that check their settings
    "packages/operations/src/headrace_operations/supervisor/process.py",  # services
    "packages/runtime/src/headrace_runtime/watchdog.py",  # the service in a container
}
"""Files that start programs of Headrace alone."""
STARTS = {"create_subprocess_exec", "create_subprocess_shell", "Popen", "run", "check_output", "check_call", "call"}


def _starts_without_environment(path: Path) -> list[int]:
    """Return the lines of calls that start a process with the whole environment of this process."""
    lines = []
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
        of_module = owner == "subprocess" and node.func.attr in STARTS
        starts = of_module or node.func.attr.startswith("create_subprocess")
        if starts and not any(keyword.arg == "env" for keyword in node.keywords):
            lines.append(node.lineno)
    return lines


def test_every_other_start_of_a_program_chooses_its_environment() -> None:
    sources = [*ROOT.glob("*/src/**/*.py"), *ROOT.glob("packages/*/src/**/*.py"), *ROOT.glob("services/*/src/**/*.py")]
    wrong = {
        str(path.relative_to(ROOT)): lines
        for path in sources
        if str(path.relative_to(ROOT)) not in OURS and (lines := _starts_without_environment(path))
    }
    assert not wrong, "pass env=program_environment(...), or add the file to OURS"
