"""Tests of repository rules, which may only become stricter.

No package imports another by a string, which would bypass the import contracts. Code is not duplicated: equal runs of
lines in two places are reported.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.repo.deployments import ROOT

LINES = 6
"""So many lines in a row are a block."""
_COMMENT = re.compile(r"\s+#.*$")
_SAYS_SOMETHING = re.compile(r"\w")


class Place(NamedTuple):
    """Line of a file."""

    path: Path
    line: int


def blocks(paths: Iterable[Path]) -> list[tuple[Place, Place]]:
    """Return each pair of places at which `LINES` consecutive lines are equal: the first one and any later one."""
    seen: dict[tuple[str, ...], list[Place]] = defaultdict(list)
    for path in paths:
        lines = list(_normalised(path.read_text(encoding="utf-8")))
        for start in range(len(lines) - LINES + 1):
            window = lines[start : start + LINES]
            seen[tuple(text for _, text in window)].append(Place(path, window[0][0]))
    return [(first, other) for first, *repeated in seen.values() for other in repeated]


def _normalised(source: str) -> Iterator[tuple[int, str]]:
    """Yield the numbered lines without indentation, comments, docstrings, imports and lone brackets."""
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        if text or isinstance(node, ast.Import | ast.ImportFrom):
            assert isinstance(node, ast.stmt)
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for number, line in enumerate(source.splitlines(), 1):
        bare = _COMMENT.sub("", line).strip()
        if number not in left_out and _SAYS_SOMETHING.search(bare):
            yield number, bare


LINES_MAX = 400
MEDIAN_MIN, MEDIAN_MAX = 120, 200
SERVICES = sorted(path.name for path in (ROOT / "services").iterdir() if (path / "pyproject.toml").exists())


def tracked(pattern: str = "*") -> list[Path]:
    """Return the tracked files. A linked folder is omitted, since its files are listed at their own path."""
    listed = subprocess.run(["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True)
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


SOURCES = [path for path in tracked("*.py") if "tests" not in path.parts]


def lines(path: Path) -> int:
    return path.read_text(encoding="utf-8").count("\n")


def test_no_file_is_longer_than_it_should_be() -> None:
    long = [str(path.relative_to(ROOT)) for path in tracked("*.py") if lines(path) > LINES_MAX]
    assert long == [], "split them: one idea per file"


def test_the_median_file_holds_one_idea_on_a_few_screens() -> None:
    median = statistics.median(lines(path) for path in SOURCES if path.name != "__init__.py")
    assert MEDIAN_MIN <= median <= MEDIAN_MAX


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
    """A thousand nested brackets raise `RecursionError`, which is not a `ValueError`."""
    careless = []
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text if re.search("json|raw_decode", text) else "")):
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


MODULE = re.compile(r"headrace(?:_[a-z]+)?(?:\.[a-z_]+)+")
PACKAGES = sorted(path for root in ("", "packages/", "services/") for path in ROOT.glob(f"{root}*/src/headrace*"))
BELOW = {"headrace_schemas", "headrace_statistics"}
ALLOWED = {
    "headrace": {"headrace_schemas"},
    "headrace_cli": BELOW | {"headrace", "headrace_operations", "headrace_runtime"},
    "headrace_integrations": BELOW | {"headrace", "headrace_operations", "headrace_runtime"},
    "headrace_operations": BELOW | {"headrace", "headrace_runtime"},
    "headrace_schemas": set(),
    "headrace_statistics": set(),
}
"""Packages that a package may import, as the contracts in pyproject.toml have it; services may import `BELOW` and the
runtime."""
PROCESSES = {("headrace_cli", "headrace_trainer.trinity_yaml")}
"""Modules that a command starts as a process."""


def module_strings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each string in a file that is the name of a Headrace module."""
    text = path.read_text(encoding="utf-8")
    if not re.search(rf"[\"']{MODULE.pattern}[\"']", text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and MODULE.fullmatch(node.value):
            file = node.value.replace(".", "/")
            if any(
                (package.parent / f"{file}{end}").exists() for package in PACKAGES for end in (".py", "/__init__.py")
            ):
                yield node.lineno, node.value


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_module_named_by_a_string_is_one_that_the_package_may_import(package: Path) -> None:
    allowed = {package.name, *ALLOWED.get(package.name, BELOW | {"headrace_runtime"})}
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {module}"
        for path in sorted(package.rglob("*.py"))
        for line, module in module_strings(path)
        if module.partition(".")[0] not in allowed and (package.name, module) not in PROCESSES
    ]
    assert wrong == []


def attribute_strings(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield the line, module and name of each string in a file that has the form of an entry point, `module:name`."""
    text = path.read_text(encoding="utf-8")
    if not re.search(rf"[\"']{MODULE.pattern}:", text):
        return
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            module, _, name = node.value.partition(":")
            if MODULE.fullmatch(module) and name.isidentifier():
                yield node.lineno, module, name


def defines(module: str, name: str) -> bool:
    """Return whether a module of Headrace defines `name` at its top level.

    The module is parsed and not imported, since torch may not be installed.
    """
    for package in PACKAGES:
        for end in (".py", "/__init__.py"):
            path = package.parent / f"{module.replace('.', '/')}{end}"
            if path.exists():
                return name in top_level_names(ast.parse(path.read_text(encoding="utf-8")))
    return False


def top_level_names(tree: ast.Module) -> set[str]:
    """Return the names that functions, classes, imports and assignments of a module bind."""
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_a_function_named_by_a_string_exists(package: Path) -> None:
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {module}:{name}"
        for path in sorted(package.rglob("*.py"))
        for line, module, name in attribute_strings(path)
        if not module.startswith("headrace_echo.") and not defines(module, name)  # an example of the documentation
    ]
    assert missing == []


def test_a_planted_name_that_does_not_exist_is_found(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text('Service("judge", "headrace_judge.app:run", "headrace_judge.app:walk")\n')
    planted = list(attribute_strings(tmp_path / "planted.py"))
    assert [defines(module, name) for _, module, name in planted] == [True, False]


def test_a_planted_import_by_string_is_found(tmp_path: Path) -> None:
    (tmp_path / "planted.py").write_text('import_module("headrace_judge.once")\nlog("headrace.no_module_of_ours")\n')
    assert list(module_strings(tmp_path / "planted.py")) == [(1, "headrace_judge.once")]


MEMBERS = sorted(path.parent for path in (ROOT / "packages").glob("*/src"))
MIRRORED = {frozenset({"async_client.py", "client.py"})}
"""Both clients, with and without asyncio, spell out every parameter for the readers of their signatures."""


def sources() -> list[Path]:
    return sorted(path for member in MEMBERS for path in (member / "src").rglob("*.py"))


def test_no_block_stands_twice() -> None:
    repetitions = [
        f"{first.path.relative_to(ROOT)}:{first.line} and {other.path.relative_to(ROOT)}:{other.line}"
        for first, other in blocks(sources())
        if frozenset({first.path.name, other.path.name}) not in MIRRORED
    ]
    assert not repetitions, "\n".join(repetitions)


def test_a_planted_duplicate_is_found(tmp_path: Path) -> None:
    body = "\n".join(f"    a{number} = {number}  # of no importance" for number in range(LINES))
    original, copy = tmp_path / "one.py", tmp_path / "other.py"
    original.write_text(f'def first() -> None:\n    """Says this."""\n{body}\n')
    indented = body.replace("    ", "        ").replace("  # of no importance", "").replace("\n", "\n\n")
    copy.write_text(f"class C:\n    def second(self) -> None:\n        import os\n{indented}\n")
    assert [(a.line, b.line) for a, b in blocks([original, copy])] == [(3, 4)]
    copy.write_text(copy.read_text().replace("a3 = 3", "a3 = 4"))
    assert blocks([original, copy]) == []


def test_one_module_computes_quantiles_of_student() -> None:
    """No source contains the coefficients of the expansion, or quantiles for 1 to 4 degrees of freedom."""
    written = re.compile(r"92_?160|\b12\.706|\b4\.302\d|\b3\.182\d|\b2\.776\d")
    sources = [
        path
        for root in ("schemas", "packages", "gateway", "services", "benchmarks", "examples")
        for path in (ROOT / root).rglob("*.py")
    ]
    assert len(sources) > 300
    assert [str(path) for path in sources if written.search(path.read_text(encoding="utf-8"))] == []
