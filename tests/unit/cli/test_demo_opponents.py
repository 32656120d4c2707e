"""Untrained models of a demo are pinned and served before the agent begins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace_cli.demo import opponents
from headrace_operations.catalog import importing
from headrace_operations.errors import StartFailed

VERSION = "villager@0123456789abcdef"


class Registry:
    """A registry whose replicas load a version after a number of seconds, or never."""

    def __init__(self, patch: pytest.MonkeyPatch, loads: int | None) -> None:
        self.calls: list[object] = []
        self._loads = loads
        self._clock = 0.0
        patch.setattr(opponents, "ModelRegistry", lambda _url, who: self)
        patch.setattr(importing, "store_folder", self._stored)
        patch.setattr(importing, "register", self._register)
        patch.setattr(opponents, "time", SimpleNamespace(monotonic=lambda: self._clock, sleep=self._sleep))

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_error: object) -> None:
        self.calls.append("closed")

    def model(self, _name: str) -> SimpleNamespace:
        loaded = self._loads is not None and self._clock >= self._loads
        return SimpleNamespace(champion=VERSION if loaded else None)

    def pin(self, name: str, version: str, *, reason: str) -> None:
        self.calls.append(("pin", name, version, self.model(name).champion, bool(reason)))

    async def _stored(self, folder: Path, name: str, base: object, environ: dict[str, str]) -> SimpleNamespace:
        self.calls.append(("stored", folder, name, base, environ))
        return SimpleNamespace(version=VERSION)

    def _register(self, _api: object, _manifest: object, *, label: str, serve: bool, why: str) -> None:
        self.calls.append(("register", label, serve, bool(why)))

    def _sleep(self, _seconds: float) -> None:
        self._clock += 1.0


async def test_it_is_registered_served_and_pinned_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(monkeypatch, loads=5)
    assert await opponents.register("url", "villager", Path("/base"), "v1.0", {"A": "b"}) == VERSION
    assert registry.calls == [
        ("stored", Path("/base"), "villager", None, {"A": "b"}),
        ("register", "v1.0", True, True),
        ("pin", "villager", VERSION, VERSION, True),
        "closed",
    ]


async def test_one_that_never_serves_ends_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(monkeypatch, loads=None)
    with pytest.raises(StartFailed, match=f"{VERSION} does not serve after 120 s"):
        await opponents.register("url", "villager", Path("/base"), "v1.0", {})
    assert registry.calls[-1] == "closed"
    assert "pin" not in [call[0] for call in registry.calls]  # type: ignore[index]
