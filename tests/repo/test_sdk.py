"""Limits for the SDK that user programs install: few lines, few dependencies, no package that operates Headrace."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.repo.compose_files import ROOT
from tests.repo.test_images import needed

LINES_MAX = 1200
"""Limit for the modules that an agent's program imports to send feedback and to read topics, without docstrings."""
REWARD_LINES_MAX = 950
"""Limit for `headrace.rewards`, a library of independent functions, counted separately and without docstrings."""
ADAPTER_LINES_MAX = 580
"""Limit for each package that such a program does not import, without docstrings (decision 21)."""
APART = {
    "evaluation", "hello_agents", "judging", "manager", "rl", "rollouts", "scenarios", "selection", "shadow",
    "trinity", "tuner",
}  # fmt: skip
PRIMITIVES = {"practice", "stack"}
"""Packages that adapters are built on. The number of their files is not limited, only the length of each file."""
NEVER = {"agentscope", "datasets", "dspy", "httpx", "openai", "torch", "transformers", "trinity", "yaml"}
IMPORTS_S_MAX = 1.0
BLOCKS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SOURCES = ROOT / "packages" / "sdk" / "src"
REWARDS = SOURCES / "headrace" / "rewards"
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


def modules() -> list[str]:
    paths = [path.relative_to(SOURCES).with_suffix("") for path in SOURCES.rglob("*.py")]
    return sorted(".".join(path.parts).removesuffix(".__init__") for path in paths)


def lines_of(part: str) -> int:
    """Return the lines, without docstrings, of a module of the package `headrace`, or of a package in it."""
    paths = [*(SOURCES / "headrace" / part).rglob("*.py"), *SOURCES.glob(f"headrace/{part}.py")]
    return sum(map(code_lines, paths))


def code_lines(path: Path) -> int:
    """Return the lines of a file without its docstrings, which may be as long as readers need."""
    text = path.read_text(encoding="utf-8")
    blocks = [node.body for node in ast.walk(ast.parse(text)) if isinstance(node, BLOCKS)]
    statements = [statement for block in blocks for statement in block if isinstance(statement, ast.Expr)]
    docstrings = [statement for statement in statements if isinstance(statement.value, ast.Constant)]
    return len(text.splitlines()) - sum((node.end_lineno or 0) - node.lineno + 1 for node in docstrings)


def parts() -> set[str]:
    return {path.stem for path in (SOURCES / "headrace").iterdir() if path.suffix == ".py" or path.is_dir()} - {
        "__pycache__"
    }


def test_it_stays_under_so_many_lines() -> None:
    assert parts() >= APART | PRIMITIVES
    assert 500 < sum(map(lines_of, parts() - APART - PRIMITIVES - {REWARDS.name})) < LINES_MAX
    assert 500 < lines_of(REWARDS.name) < REWARD_LINES_MAX
    assert all(path.parent == REWARDS for path in REWARDS.rglob("*.py"))


@pytest.mark.parametrize("part", sorted(APART))
def test_an_adapter_stays_an_adapter(part: str) -> None:
    assert 0 < lines_of(part) <= ADAPTER_LINES_MAX


def test_no_file_imports_other_peoples_packages_at_its_top() -> None:
    for path in sorted((SOURCES / "headrace").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
        imported |= {node.module or "" for node in tree.body if isinstance(node, ast.ImportFrom)}
        assert {name.partition(".")[0] for name in imported}.isdisjoint(NEVER), path


def test_all_adapters_together_are_imported_in_no_time() -> None:
    """The limit is in processor time, so that other work on the machine does not decide the result."""
    names = [f"headrace.{part}" for part in sorted(APART | PRIMITIVES)]
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


def test_it_needs_pydantic_httpx_schemas_and_statistics() -> None:
    direct = {
        canonicalize_name(Requirement(requirement).name)
        for requirement in requires("headrace") or []
        if "extra ==" not in requirement
    }
    assert direct == {"headrace-schemas", "headrace-statistics", "httpx2", "pydantic"}


def test_every_module_is_imported_where_nothing_else_is_installed() -> None:
    """Without the extra for topics, functions that read topics raise an error that names the extra."""
    sdk_distributions = needed(["headrace"]) | {"headrace", "headrace-schemas", "headrace-statistics"}
    installed = packages_distributions().items()
    absent = {name for name, owners in installed if not sdk_distributions.intersection(map(canonicalize_name, owners))}
    members = [
        *ROOT.glob("*/src/headrace_*"),
        *ROOT.glob("packages/*/src/headrace_*"),
        *ROOT.glob("services/*/src/headrace_*"),
    ]
    absent |= {path.name for path in members} - {"headrace_schemas", "headrace_statistics"}
    assert {"headrace_runtime", "headrace_cli", "torch", "faust", "typer", "aiokafka", "fsspec"} <= absent
    arguments = json.dumps(sorted(absent)), json.dumps(modules())
    process = subprocess.run([sys.executable, "-c", ALONE, *arguments], capture_output=True, text=True, check=False)
    remedy = "reading topics needs the extra: pip install 'headrace[topics]'"
    assert process.stdout.splitlines() == ["http://127.0.0.1:1/sessions/s/v1", remedy, remedy], process.stderr
