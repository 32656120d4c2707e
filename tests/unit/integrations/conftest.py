"""Fixtures that compare the effects of two runs of an adapter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.errors import HeadraceError
from tests.unit.integrations.rig import Rig, write_rows


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Rig:
    monkeypatch.chdir(tmp_path)
    for name in ("rows", "other"):
        write_rows(tmp_path, name, 4 if name == "rows" else 3)
    return Rig(monkeypatch, tmp_path, caplog)


@pytest.fixture
def compare(rig: Rig, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Check that `changed` has other effects than `plain`, or is refused with a message that names the argument."""

    def compare(name: str, plain: Callable[[], object], changed: Callable[[], object]) -> None:
        before = rig.played(plain, capsys)
        rig.stack.forget()
        refusal = None
        try:
            after = rig.played(changed, capsys)
        except (HeadraceError, TypeError, ValueError) as error:
            refusal = str(error)
        if refusal is None:
            assert after != before, f"{name} is read and ignored"
            return
        assert name.rpartition(".")[2] in refusal, f"the refusal of {name} does not name it: {refusal}"
        assert refusal.isprintable()
        assert len(refusal) < 1_000

    return compare
