"""What users import stays: names, and how long importing takes."""

from __future__ import annotations

import subprocess
import sys

import headrace

EXPORTS = ["ApiError", "AsyncClient", "AsyncSession", "Client", "HeadraceError", "Session", "Unreachable"]


def test_the_public_names_are_frozen() -> None:
    assert sorted(headrace.__all__) == EXPORTS
    for name in EXPORTS:
        assert getattr(headrace, name).__name__ == name
    assert dir(headrace) == EXPORTS


def test_one_error_tree() -> None:
    assert issubclass(headrace.ApiError, headrace.HeadraceError)
    assert issubclass(headrace.Unreachable, headrace.HeadraceError)


def test_the_package_itself_imports_nothing() -> None:
    code = (
        "import sys; import headrace; print([m for m in ('httpx2', 'pydantic', 'typer', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
