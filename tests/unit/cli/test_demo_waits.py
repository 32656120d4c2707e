"""Error messages of a demo that waits in vain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace_cli.demo import performance
from headrace_cli.demo.performance import Performance, StackAddress
from headrace_cli.demo.watch import Watch
from headrace_operations.errors import StartFailed


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Performance:
    for name in ("_FIRST_VERSION_S_MAX", "_LAST_AUDIT_S_MAX"):
        monkeypatch.setattr(performance, name, 0.02)
    nothing: Any = SimpleNamespace()
    return Performance(
        nothing, nothing, StackAddress("127.0.0.1:1", "http://127.0.0.1:1"), nothing, Watch("127.0.0.1:1", "m")
    )


async def test_no_first_version_is_a_sentence(played: Performance) -> None:
    with pytest.raises(StartFailed, match=r"no version took over and was measured within 0\.02 s; .*`headrace logs`"):
        await played._wait_first_version(lambda: True)


async def test_a_last_version_that_is_not_measured_is_named(played: Performance) -> None:
    played.watch.champions.append("m@1")
    with pytest.raises(StartFailed, match=r"m@1 was not measured within 0\.02 s"):
        await played._wait_last_audit()
