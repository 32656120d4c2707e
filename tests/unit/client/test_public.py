"""Public names are frozen, and importing the client imports few modules."""

from __future__ import annotations

import subprocess
import sys

import pytest

import headrace

EXPORTS = [
    "ApiError",
    "AsyncClient",
    "AsyncSession",
    "Client",
    "HeadraceError",
    "ModelManager",
    "Session",
    "Unreachable",
]


def test_the_public_names_are_frozen() -> None:
    assert sorted(headrace.__all__) == EXPORTS
    for name in EXPORTS:
        assert getattr(headrace, name).__name__ == name
    assert dir(headrace) == EXPORTS


def test_earlier_names_of_renamed_functions_and_classes_still_import() -> None:
    from headrace_integrations import practice, shadow

    assert practice.practise is practice.train_on_tasks
    assert practice.asked is practice.call_agent
    assert shadow.Door is shadow.TrajectorySink
    assert shadow.HeadraceDoor is shadow.HeadraceSink
    assert shadow.TrinityDoor is shadow.TrinitySink


def test_one_error_tree() -> None:
    assert issubclass(headrace.ApiError, headrace.HeadraceError)
    assert issubclass(headrace.Unreachable, headrace.HeadraceError)


HEAVY = {"aiokafka", "asyncio", "fsspec", "http", "httpx2", "numpy", "pydantic", "rich", "ssl", "typer"}
"""Modules with long import times. A program imports them only where it uses them; a benchmark measures the
seconds."""
MODULES_MAX = 120
"""Limit on modules of the standard library and of Headrace; about 75 today, which depends on the Python version."""


def imported(statement: str) -> set[str]:
    """Return the modules that a statement imports in a new interpreter."""
    code = f"import sys; before = {{*sys.modules}}; {statement}; print(*{{*sys.modules}} - before)"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(process.stdout.split())


@pytest.mark.parametrize("statement", ["import headrace", "from headrace import ApiError, Client, Session"])
def test_importing_the_client_imports_little(statement: str) -> None:
    names = imported(statement)
    assert not HEAVY & names
    assert len(names) < MODULES_MAX, sorted(names)


def test_making_a_client_imports_no_event() -> None:
    """An agent's program needs HTTP, but no module of the bus."""
    names = imported("from headrace import Client; Client().session('s', task_id='t')")
    assert "httpx2" in names
    assert not {"pydantic", "aiokafka"} & names
    assert not [name for name in names if name.startswith("headrace_schemas.events")]
