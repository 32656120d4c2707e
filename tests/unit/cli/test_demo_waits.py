"""What a demo says when what it waits for does not come."""

from __future__ import annotations

import pytest

from headrace_cli.demo import runner
from headrace_cli.demo.watch import Watch
from headrace_cli.errors import StartFailed


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    for name in ("_FIRST_VERSION_S_MAX", "_LAST_AUDIT_S_MAX"):
        monkeypatch.setattr(runner, name, 0.02)
    return Watch("127.0.0.1:1", lambda *_: None)


async def test_no_first_version_is_a_sentence(watch: Watch) -> None:
    with pytest.raises(StartFailed, match=r"no version took over and was measured within 0\.02 s; .*`headrace logs`"):
        await runner._first_version(watch)


async def test_a_last_version_that_is_not_measured_is_named(watch: Watch) -> None:
    watch.champions.append("m@1")
    with pytest.raises(StartFailed, match=r"m@1 was not measured within 0\.02 s"):
        await runner._last_audit(watch)
