"""Tests of make targets, of service start-up, of package metadata, and of the dependencies and imports of the client.

The targets that pages and messages name exist, and former names still work. Services show their help without heavy
imports, and refuse unused settings. Distributions share one version and have the fields that an index shows.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from importlib.metadata import packages_distributions, requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import headrace
from headrace_runtime.kafka import topics
from headrace_runtime.services import installed_services
from tests.repo.deployments import ROOT
from tests.repo.sizes import sizes, tracked_files
from tests.repo.test_images import needed

COMMAND = re.compile(
    r"(?:`make |^(?:\$ )?make (?=[a-z-]+(?: [A-Z]+=.*|\s+#.*)?$))"
    r"([a-z][a-z-]*)((?: (?:NAME|GROUP)=(?:\"[^\"]+\"|[a-z][\w-]*))?)",
    re.MULTILINE,
)
NAMED_IN = ("*.md", ".ci/run", "*.yml", "pyproject.toml", "packages/*.py", "services/*.py", "tests/support/presence.py")
FORMER = {
    "attack": "check NAME=attack", "compose-test": "check NAME=compose", "test-jobs": "check NAME=jobs",
    "bench-bus": 'bench NAME="bus replay"', "bench-gate": "bench NAME=gate", "demo-swaps": "demo NAME=swaps",
    "example-math": "example NAME=math", "install-clients": "install GROUP=clients", "lock-images": "lock",
}  # fmt: skip
"""One former name of each rule to its present one."""
ADAPTERS = {"evaluation", "hello_agents", "judging", "rl", "scenarios", "selection", "shadow", "trinity", "tuner"}
PRIMITIVES = {"practice", "stack"}
"""Packages that adapters are built on."""
NEVER = {"agentscope", "datasets", "dspy", "httpx", "openai", "torch", "transformers", "trinity", "yaml"}
IMPORTS_S_MAX = 1.0
CLIENT = ROOT / "packages" / "client" / "src"
INTEGRATIONS = ROOT / "packages" / "integrations" / "src"
ALONE = """
import json, sys
from importlib.abc import MetaPathFinder

class Missing(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

absent = set(json.loads(sys.argv[1]))
sys.meta_path.insert(0, Missing())
from importlib import import_module
for name in json.loads(sys.argv[2]):
    import_module(name)

import asyncio, headrace
from headrace import rewards
from headrace.errors import UsageError
from headrace.topics import connected

with headrace.Client("http://127.0.0.1:1") as client:
    print(client.session("s", task_id="t").base_url)

async def read():
    async with connected("127.0.0.1:1"):
        pass

for work in (read, lambda: rewards.consume(len, source="s", bus="127.0.0.1:1")):
    try:
        asyncio.run(work())
    except UsageError as error:
        print(error)
"""


def named_commands() -> set[tuple[str, str]]:
    """Return the target and NAME of every make command in pages and messages. Change logs may have former names."""
    command = ["git", "ls-files", *NAMED_IN, ":!*CHANGELOG*"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return {match for path in listed for match in COMMAND.findall((ROOT / path).read_text(encoding="utf-8"))}


def dry_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


NEEDED = re.findall(r"^needs_([a-z]+)_(\w+) = (\S+)/installed$", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("target", "name", "environment"), NEEDED)
def test_a_name_installs_the_environment_that_it_needs(target: str, name: str, environment: str) -> None:
    plan = dry_run("--always-make", target, f"NAME={name}")
    assert plan.returncode == 0, plan.stderr
    assert f"-m venv {environment}\n" in plan.stdout


@pytest.mark.parametrize(("target", "name"), sorted(named_commands()))
def test_a_command_that_is_named_exists_under_its_present_name(target: str, name: str) -> None:
    run = dry_run(target, *filter(None, [name.strip().replace('"', "")]))
    assert run.returncode == 0, run.stderr
    assert "is now:" not in run.stdout, run.stdout.splitlines()[0]


@pytest.mark.parametrize("former", FORMER)
def test_a_former_name_prints_the_present_one_and_runs_it(former: str) -> None:
    run = dry_run(former, "SEED=7")
    assert f"make {former} is now: make {FORMER[former]}\n" in run.stdout
    target, _, name = FORMER[former].partition(" ")
    assert dry_run(target, *filter(None, [name.replace('"', "")]), "SEED=7").stdout in run.stdout


_LOAD_PROGRAMS = """
import sys
from tests.system.program import MODULES, load
path = list(sys.path)
for name in MODULES:
    sys.path[:] = path
    load(name)
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_test_program_is_imported_without_the_paths_of_pytest() -> None:
    command = [sys.executable, "-c", _LOAD_PROGRAMS]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("arguments", ["check", "check NAME=nothing", "bench NAME=nothing", "test-nothing"])
def test_an_unknown_name_is_refused_with_the_names_that_exist(arguments: str) -> None:
    run = dry_run(*arguments.split())
    assert run.returncode == 2
    assert "gate" in run.stderr or "attack" in run.stderr


INSTALLED = installed_services()
MODULES = {name: info.module for name, info in INSTALLED.items()}
HEAVY = ("torch", "transformers", "faust", "aiokafka", "sqlalchemy", "starlette")
_REPORT = """
import sys, runpy
sys.argv = ["x", "--help"]
try:
    runpy.run_module("{module}", run_name="__main__")
except SystemExit as stop:
    assert not stop.code, stop.code
print("HEAVY", [name for name in {heavy} if name in sys.modules])
"""


def test_every_service_is_announced() -> None:
    assert {"gateway", "broker", "collector", "scorer", "judge", "trainer", "registry", "inference"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES.keys())
def test_help_imports_nothing_heavy(module: str) -> None:
    code = _REPORT.format(module=module, heavy=HEAVY)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert "--config" in result.stdout
    assert result.stdout.endswith("HEAVY []\n")


@pytest.mark.parametrize(("name", "module"), MODULES.items(), ids=MODULES.keys())
def test_an_unknown_setting_stops_the_start(name: str, module: str) -> None:
    environ = {**os.environ, f"HEADRACE_{name.upper()}__PROT": "1"}
    result = subprocess.run(
        [sys.executable, "-m", module], capture_output=True, text=True, env=environ, timeout=30, check=False
    )
    assert result.returncode == 2
    assert f"setting {name}.prot = 1: unknown; did you mean 'port'?" in result.stderr


@pytest.mark.parametrize("topic", topics.catalogue().values(), ids=lambda topic: topic.name)
def test_services_announce_the_topics_that_name_them(topic: topics.Topic) -> None:
    readers = {name for name, info in INSTALLED.items() if topic.name in info.consumes}
    writers = {name for name, info in INSTALLED.items() if topic.name in info.produces}
    assert readers == INSTALLED.keys() & set(topic.consumers)
    assert topic.producer in writers or topic.producer not in INSTALLED


@pytest.mark.parametrize("name", MODULES)
def test_an_announcement_is_light(name: str) -> None:
    """Every program that lists the installed services imports their `ServiceInfo`."""
    code = f"""
import sys
from headrace_runtime import services
before = {{*sys.modules}}
services.SERVICES.get({name!r})
print(sorted(name for name in {{*sys.modules}} - before if name.startswith("headrace")))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    module = MODULES[name]
    assert process.stdout.strip() in {str([module]), str([module, f"{module}.service"])}


PROJECTS = sorted(ROOT / folder / "pyproject.toml" for folder in ("schemas", "gateway", "examples"))
PROJECTS += sorted([*ROOT.glob("packages/*/pyproject.toml"), *ROOT.glob("services/*/pyproject.toml")])
CHANGELOG = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def project(path: Path) -> dict[str, Any]:
    table: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return table


def test_changelog_has_a_section_for_the_version_of_the_client() -> None:
    assert f"\n## [{headrace.__version__}] - " in CHANGELOG


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_distribution_has_the_version_and_pins_others_to_it(path: Path) -> None:
    table = project(path)
    assert table["version"] == headrace.__version__
    extras = [text for texts in table.get("optional-dependencies", {}).values() for text in texts]
    for text in (*table["dependencies"], *extras):
        requirement = Requirement(text)
        if requirement.name.startswith("headrace") and requirement.name != table["name"]:
            pinned = (
                {"", f"=={headrace.__version__}"} if requirement.extras == {"db"} else {f"=={headrace.__version__}"}
            )
            assert str(requirement.specifier) in pinned, text


@pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)
def test_distribution_has_readme_licence_urls_and_classifiers(path: Path) -> None:
    table = project(path)
    assert (path.parent / table["readme"]).is_file()
    assert table["license"] == "Apache-2.0"
    assert table["urls"].keys() == {"Documentation", "Source", "Changelog"}
    assert "Programming Language :: Python :: 3" in table["classifiers"]
    build = tomllib.loads(path.read_text(encoding="utf-8"))["tool"]["hatch"]["build"]["targets"]
    (licence,) = build["sdist"]["force-include"]
    assert (path.parent / licence).samefile(ROOT / "LICENSE")


def test_the_product_installs_no_torch_and_its_extras_add_it() -> None:
    table = project(ROOT / "packages/headrace/pyproject.toml")
    names = {Requirement(text).name for text in table["dependencies"]}
    assert names.isdisjoint({"headrace-trainer", "headrace-inference", "headrace-demo"})
    assert {"headrace-client", "headrace-cli", "headrace-gateway", "headrace-registry", "headrace-broker"} <= names
    local = {Requirement(text).name for text in table["optional-dependencies"]["local"]}
    assert local == {"headrace-trainer", "headrace-inference", "headrace-demo"}


def test_sizes_are_counted_and_the_client_is_small() -> None:
    measured = {size.name: size for size in sizes(tracked_files("HEAD"))}
    assert all(size.value > 0 for size in measured.values())
    for name in ("lines of the client", "targets of make", "entries at the root", "decision records"):
        assert measured[name].holds, f"{name}: {measured[name].value:g}, {measured[name].limit}"


def modules(sources: Path) -> list[str]:
    paths = [path.relative_to(sources).with_suffix("") for path in sources.rglob("*.py")]
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)


@pytest.mark.parametrize("module", [name for name in modules(INTEGRATIONS) if name.startswith("headrace.")])
def test_a_public_path_has_the_names_of_the_module_behind_it(module: str) -> None:
    """Users import `headrace.tuner`; the code is in `headrace_integrations.tuner`."""
    path = INTEGRATIONS.joinpath(*module.split("."))
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    imported = [node for node in ast.parse(text).body if isinstance(node, ast.ImportFrom)]
    behind = import_module(str(imported[0].module))
    assert {node.module for node in imported} == {behind.__name__}
    public = import_module(module)
    chosen = {alias.asname or alias.name: alias.name for node in imported for alias in node.names if alias.name != "*"}
    if set(chosen) <= {"__all__"}:  # the whole module
        names = getattr(behind, "__all__", None) or [name for name in vars(behind) if not name.startswith("_")]
        chosen = {name: name for name in names}
    assert chosen
    assert all(getattr(public, name) is getattr(behind, original) for name, original in chosen.items())


def test_no_file_imports_other_peoples_packages_at_its_top() -> None:
    for path in sorted((*CLIENT.rglob("*.py"), *INTEGRATIONS.rglob("*.py"))):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert {name.partition(".")[0] for name in imported}.isdisjoint(NEVER), path


def test_all_adapters_together_are_imported_in_no_time() -> None:
    """The limit is in CPU time, so that other work on the machine does not decide the result."""
    names = [f"headrace_integrations.{part}" for part in sorted(ADAPTERS | PRIMITIVES)]
    code = (
        "import json, sys, time; began = time.process_time(); from importlib import import_module\n"
        "for name in json.loads(sys.argv[1]):\n"
        "    module = import_module(name)\n"
        "    [getattr(module, one) for one in getattr(module, '__all__', ())]\n"
        "print(time.process_time() - began)"
    )
    times = []
    for _ in range(3):
        process = subprocess.run(
            [sys.executable, "-c", code, json.dumps(names)], capture_output=True, text=True, check=True
        )
        times.append(float(process.stdout))
    assert min(times) < IMPORTS_S_MAX, times


def test_the_client_needs_pydantic_httpx_and_schemas() -> None:
    direct = {
        canonicalize_name(Requirement(requirement).name)
        for requirement in requires("headrace-client") or []
        if "extra ==" not in requirement
    }
    assert direct == {"headrace-schemas", "httpx2", "pydantic"}


def test_every_module_is_imported_where_nothing_else_is_installed() -> None:
    """Without the extra for topics, functions that read topics raise an error that names the extra."""
    client_distributions = needed(["headrace-client"]) | {"headrace-client", "headrace-schemas"}
    installed = packages_distributions().items()
    absent = {
        name for name, owners in installed if not client_distributions.intersection(map(canonicalize_name, owners))
    }
    members = [
        *ROOT.glob("*/src/headrace_*"),
        *ROOT.glob("packages/*/src/headrace_*"),
        *ROOT.glob("services/*/src/headrace_*"),
    ]
    absent |= {path.name for path in members} - {"headrace_schemas"}
    assert {"headrace_runtime", "headrace_cli", "torch", "faust", "typer", "aiokafka", "fsspec"} <= absent
    arguments = json.dumps(sorted(absent)), json.dumps(modules(CLIENT))
    process = subprocess.run([sys.executable, "-c", ALONE, *arguments], capture_output=True, text=True, check=False)
    remedy = "reading topics needs the extra: pip install 'headrace-client[topics]'"
    assert process.stdout.splitlines() == ["http://127.0.0.1:1/sessions/s/v1", remedy, remedy], process.stderr
