"""Test server of one file: `python -m tests.mutants.server FILE TEST...` returns the tests' verdict on each mutant.

Each line on standard input is a trial: the folder of an overlay, a file for pytest's output, a time limit, and a plan
(`tests.mutants.trial`). The server prints a line with pytest's exit status, or null after the time limit. A trial is
a fork of this process, which has imported all modules that do not depend on the file, so that a short trial costs
little more than its tests.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import importlib
import importlib.abc
import importlib.util
import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import pytest

from tests.mutants.trial import ROOT, planned, split

_OWN = ("headrace", "tests", "email_agent", "email_search", "example_parts", "math_agent", "smollm2", "werewolf")
_OPTIONS = ("-x", "-q", "--no-header", "-p", "no:cacheprovider", "-m", "not postgres")
_TEST_LIMIT_S = 30
"""None of the tests takes long, so a test that a mutant blocks runs into this short timeout. The unchanged file has no
limit for one test, because the recording of its lines is slow."""


class Changed(importlib.abc.MetaPathFinder):
    """Import finder of one module in the overlay, needed because its package is already imported from the checkout."""

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        self.path = path

    def find_spec(self, name: str, _path: object, _target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self._name:
            return None
        inside = [str(self.path.parent)] if self.path.name == "__init__.py" else None
        return importlib.util.spec_from_file_location(name, self.path, submodule_search_locations=inside)


def main(file: str, tests: Sequence[str]) -> None:
    package, inside = split(file)
    parts = (package.name, *inside.with_suffix("").parts)
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    sys.dont_write_bytecode = True
    imported = [importlib.import_module(test.removesuffix(".py").replace("/", ".")) for test in tests]
    _forget({name, *(module.__name__ for module in imported)})
    gc.collect()
    gc.freeze()  # what is shared with the forks is not written to
    for line in sys.stdin:
        overlay, log, timeout_s, plan = json.loads(line)
        changed = Changed(name, Path(overlay, package.name, inside))
        print(json.dumps(_fork(changed, overlay, log, tests, timeout_s, plan)), flush=True)


def _forget(changed: set[str]) -> None:
    """Remove our modules that import the changed file from `sys.modules`, so that each trial imports them again."""
    imports_of = {name: _imports(name, module) for name, module in sys.modules.items() if name.startswith(_OWN)}
    affected = set(changed)
    while more := {name for name, imported in imports_of.items() if imported & affected} - affected:
        affected |= more
    for name in affected:
        module = sys.modules.pop(name, None)
        parent, _, leaf = name.rpartition(".")
        if module is not None and vars(sys.modules.get(parent, module)).get(leaf) is module:
            delattr(sys.modules[parent], leaf)


def _imports(name: str, module: ModuleType) -> set[str]:
    """Return all names that a module imports anywhere in its source. Some may be modules of a package."""
    path = getattr(module, "__file__", None)
    if path is None or not path.endswith(".py"):
        return set()
    names = set()
    for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names - {name}


def _fork(
    changed: Changed, overlay: str, log: str, tests: Sequence[str], timeout_s: float, plan: Sequence[str]
) -> int | None:
    pid = os.fork()
    if pid == 0:
        _run(changed, overlay, log, tests, plan)
    watched = os.pidfd_open(pid)
    try:
        ended, _, _ = select.select([watched], [], [], timeout_s)
    finally:
        os.close(watched)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # with whatever the tests have started
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def _run(changed: Changed, overlay: str, log: str, tests: Sequence[str], plan: Sequence[str]) -> NoReturn:
    """Run pytest in the forked process, as with `PYTHONPATH=OVERLAY`, in a new process group."""
    os.setsid()
    with Path(log).open("w", encoding="utf-8") as output:
        os.dup2(output.fileno(), sys.stdout.fileno())
        os.dup2(output.fileno(), sys.stderr.fileno())
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), sys.stdin.fileno())
    path = os.pathsep.join(filter(None, (overlay, os.environ.get("PYTHONPATH"))))
    os.environ |= {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}  # for processes that tests start
    sys.path[:0] = [overlay]
    sys.meta_path.insert(0, changed)
    status = 3
    try:
        files, plugin = planned(plan, tests, changed.path)
        limit = f"timeout={0 if plan[0] == 'record' else _TEST_LIMIT_S}"
        status = int(pytest.main([*_OPTIONS, "-o", limit, *files], plugins=[plugin]))
    finally:
        if status == 3:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)  # threads that a mutant left behind keep nobody waiting


if __name__ == "__main__":
    os.chdir(ROOT)
    main(sys.argv[1], sys.argv[2:])
