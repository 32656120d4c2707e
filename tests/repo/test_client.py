"""Tests of the limits of the client and the adapters that user programs install: few dependencies and fast imports."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib import import_module
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.repo.compose_files import ROOT
from tests.repo.test_images import needed

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
