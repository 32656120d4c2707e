"""Rules that keep the repository a pleasure to read. They only ever get stricter."""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.repo.compose_files import ROOT

LINES_MAX = 400
MEDIAN_MAX = 130
SERVICES = sorted(path.name for path in (ROOT / "services").iterdir() if (path / "pyproject.toml").exists())


def tracked(pattern: str = "*") -> list[Path]:
    """Files; a linked folder is none, and what is in it is listed where it lies."""
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


SOURCES = [path for path in tracked("*.py") if "tests" not in path.parts]


def lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def test_no_file_is_longer_than_it_should_be() -> None:
    long = [str(path.relative_to(ROOT)) for path in tracked("*.py") if lines(path) > LINES_MAX]
    assert long == [], "split them: one idea per file"


def test_the_median_file_fits_two_screens() -> None:
    assert statistics.median(lines(path) for path in SOURCES if path.name != "__init__.py") <= MEDIAN_MAX


def test_every_module_and_public_class_says_what_it_is() -> None:
    silent = []
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if tree.body and ast.get_docstring(tree) is None:
            silent.append(f"{path.relative_to(ROOT)}: the module")
        public = [node for node in tree.body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
        silent += [f"{path.relative_to(ROOT)}: {node.name}" for node in public if ast.get_docstring(node) is None]
    assert silent == []


def test_no_heavy_module_is_imported_at_the_top_of_a_start_file() -> None:
    heavy = {"torch", "transformers", "peft", "faust", "aiokafka", "sqlalchemy", "starlette", "uvicorn"}
    for path in SOURCES:
        if path.name not in {"__main__.py", "settings.py"}:
            continue
        names = {name for node in ast.walk(ast.parse(path.read_text())) for name in _imported(node)}
        assert not names & heavy, f"{path.relative_to(ROOT)} imports {names & heavy}"


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name.split(".")[0] for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module:
        return [node.module.split(".")[0]]
    return []


@pytest.mark.parametrize("service", [*SERVICES, "gateway"])
def test_a_service_has_its_furniture(service: str) -> None:
    folder = ROOT / "gateway" if service == "gateway" else ROOT / "services" / service
    package = folder / "src" / f"headrace_{service}"
    for name in ("__init__.py", "__main__.py", "app.py", "settings.py", "py.typed"):
        assert (package / name).exists(), name
    readme = (folder / "README.md").read_text(encoding="utf-8").lower()
    for word in ("consumes", "produces", "state", "dies", "metrics"):
        assert word in readme, f"the README of {service} says nothing about {word!r}"


def test_metrics_are_made_in_their_catalogue_only() -> None:
    makers = re.compile(r"from prometheus_client import [^\n]*\b(Counter|Gauge|Histogram|Summary)\b")
    for path in SOURCES:
        if path.name != "metrics.py":
            assert not makers.search(path.read_text(encoding="utf-8")), path.relative_to(ROOT)


def test_whoever_catches_wrong_json_catches_deep_json() -> None:
    """A thousand brackets raise `RecursionError`, which is no `ValueError`."""
    careless = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Try) and _parses_json(node.body):
                caught = _names(handler.type for handler in node.handlers)
            elif isinstance(node, ast.With) and _parses_json(node.body):
                caught = _names(item.context_expr for item in node.items)
            else:
                continue
            if caught & {"ValueError", "JSONDecodeError"} and not caught & {"RecursionError", "Exception"}:
                careless.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert careless == [], "catch RecursionError as well"


def _parses_json(body: list[ast.stmt]) -> bool:
    calls = (node.func for part in body for node in ast.walk(part) if isinstance(node, ast.Call))
    return any(ast.unparse(call) in ("json.loads", "json.load") or ast.unparse(call).endswith((".json", ".raw_decode"))
               for call in calls)  # fmt: skip


def _names(nodes: Iterable[ast.AST | None]) -> set[str]:
    inner = (part for node in nodes if node is not None for part in ast.walk(node))
    return {part.attr if isinstance(part, ast.Attribute) else part.id for part in inner
            if isinstance(part, ast.Attribute | ast.Name)}  # fmt: skip


def test_nothing_names_a_machine_or_a_registry() -> None:
    hosts = ["pypi" + ".org", "pythonhosted" + ".org", "registry.npmjs" + ".org", "repo1.maven" + ".org"]
    machine = [f"/{folder}/" for folder in ("work", "root")]
    for path in tracked():
        text = path.read_text(encoding="utf-8", errors="replace")
        for word in [*hosts, *machine]:
            assert word not in text, f"{path.relative_to(ROOT)} holds {word!r}"


def test_every_locked_package_has_a_hash_and_an_exact_version() -> None:
    text = (ROOT / "requirements/workspace.lock").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=[a-z0-9])", "\n" + text)[1:]
    assert len(entries) > 100
    for entry in entries:
        assert re.match(r"[a-z0-9._-]+(\[[a-z,_-]+\])?==[^ ]+ ", entry), entry[:80]
        assert "--hash=sha256:" in entry, entry[:80]


def test_the_readme_is_short() -> None:
    assert lines(ROOT / "README.md") < 200


def test_skips_have_reasons() -> None:
    bare = re.compile(r"pytest\.(skip\(\)|mark\.skip\b(?!\())")
    for path in tracked("tests/*.py"):
        assert not bare.search(path.read_text(encoding="utf-8")), path.relative_to(ROOT)
