"""What users import stays: names, and how much importing them imports."""

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
    from headrace import practice, shadow

    assert practice.practise is practice.train_on_tasks
    assert practice.asked is practice.call_agent
    assert shadow.Door is shadow.TrajectorySink
    assert shadow.HeadraceDoor is shadow.HeadraceSink
    assert shadow.TrinityDoor is shadow.TrinitySink


def test_one_error_tree() -> None:
    assert issubclass(headrace.ApiError, headrace.HeadraceError)
    assert issubclass(headrace.Unreachable, headrace.HeadraceError)


HEAVY = {"aiokafka", "asyncio", "fsspec", "http", "httpx2", "numpy", "pydantic", "rich", "ssl", "typer"}
"""What takes most of the time when it is imported. A program pays for it where it is used; `make bench-state` measures
the seconds."""
MODULES_MAX = 120
"""Of the standard library and ours; some 75 today, and Python moves its own about."""


def imported(statement: str) -> set[str]:
    """The modules that a fresh interpreter has after it, and had not before."""
    code = f"import sys; before = {{*sys.modules}}; {statement}; print(*{{*sys.modules}} - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("statement", ["import headrace", "from headrace import ApiError, Client, Session"])
def test_importing_the_client_imports_little(statement: str) -> None:
    found = imported(statement)
    assert not HEAVY & found
    assert len(found) < MODULES_MAX, sorted(found)


def test_making_a_client_imports_no_event() -> None:
    """An agent's program needs HTTP and nothing of what travels on the bus."""
    found = imported("from headrace import Client; Client().session('s', task_id='t')")
    assert "httpx2" in found
    assert not {"pydantic", "aiokafka"} & found
    assert not [name for name in found if name.startswith("headrace_schemas.events")]
