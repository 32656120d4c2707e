"""No package of ours imports another one by a string, where the import contracts could not see it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.repo.compose_files import ROOT

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
    """Return the line and the text of each string of a file that is the name of a module of ours."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
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
    """Return line, module and name of each string of a file that has the form of an entry point, `module:name`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            module, _, name = node.value.partition(":")
            if MODULE.fullmatch(module) and name.isidentifier():
                yield node.lineno, module, name


def defines(module: str, name: str) -> bool:
    """Return whether a module of ours has a name at its top level. It is parsed, since torch may not be installed."""
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
