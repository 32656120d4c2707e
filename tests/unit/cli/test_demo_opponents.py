"""Models of a demo that nobody trains serve, pinned, before the agent begins."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace_cli.demo import opponents
from headrace_operations.catalog import importing
from headrace_operations.errors import StartFailed

VERSION = "villager@0123456789abcdef"


class Registry:
    """Replicas take some time to load what is to be served."""

    def __init__(self, patch: pytest.MonkeyPatch, loads: int | None) -> None:
        self.done: list[object] = []
        self._loads = loads
        self._clock = 0.0
        patch.setattr(opponents, "ModelRegistry", lambda _url, who: self)
        patch.setattr(importing, "store_folder", self._stored)
        patch.setattr(importing, "register", self._register)
        patch.setattr(opponents, "time", SimpleNamespace(monotonic=lambda: self._clock, sleep=self._sleep))

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_error: object) -> None:
        self.done.append("closed")

    def model(self, _name: str) -> SimpleNamespace:
        loaded = self._loads is not None and self._clock >= self._loads
        return SimpleNamespace(champion=VERSION if loaded else None)

    def pin(self, name: str, version: str, *, reason: str) -> None:
        self.done.append(("pin", name, version, self.model(name).champion, bool(reason)))

    async def _stored(self, folder: Path, name: str, base: object, environ: dict[str, str]) -> SimpleNamespace:
        self.done.append(("stored", folder, name, base, environ))
        return SimpleNamespace(version=VERSION)

    def _register(self, _api: object, _made: object, *, label: str, serve: bool, why: str) -> None:
        self.done.append(("register", label, serve, bool(why)))

    def _sleep(self, _seconds: float) -> None:
        self._clock += 1.0


async def test_it_is_registered_served_and_pinned_in_this_order(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(monkeypatch, loads=5)
    assert await opponents.register("url", "villager", Path("/base"), "v1.0", {"A": "b"}) == VERSION
    assert registry.done == [
        ("stored", Path("/base"), "villager", None, {"A": "b"}),
        ("register", "v1.0", True, True),
        ("pin", "villager", VERSION, VERSION, True),
        "closed",
    ]


async def test_one_that_never_serves_ends_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    registry = Registry(monkeypatch, loads=None)
    with pytest.raises(StartFailed, match=f"{VERSION} does not serve after 120 s"):
        await opponents.register("url", "villager", Path("/base"), "v1.0", {})
    assert registry.done[-1] == "closed"
    assert "pin" not in [one[0] for one in registry.done]  # type: ignore[index]
