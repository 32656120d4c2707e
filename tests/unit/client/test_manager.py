"""`ModelManager`: named versions, with all decisions made by the registry."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime

import httpx2
import pytest

from headrace import ApiError, ModelManager
from headrace.errors import UsageError
from headrace.registry import ModelRegistry

OLD, NEW = "m@0000000000000000", "m@1111111111111111"


def manager(answer: Callable[[httpx2.Request], httpx2.Response]) -> ModelManager:
    return ModelManager("m", ModelRegistry("http://registry", transport=httpx2.MockTransport(answer)))


class Registry:
    """Registry that answers as the real one, and records requests."""

    def __init__(self, champion: str | None = OLD) -> None:
        self.champion = champion
        self.posted: list[tuple[str, dict[str, object]]] = []
        self.refuse: str | None = None

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "POST":
            self.posted.append((request.url.path, json.loads(request.content)))
            if self.refuse:
                return httpx2.Response(409, json={"error": {"message": self.refuse, "code": "alias_moved"}})
        if request.url.path.endswith("/versions"):
            fields = {"model": "m", "lineage": "main", "step": 0, "registered_at": datetime.now(UTC).isoformat()}
            data = [
                {"id": NEW, "state": "promoted", **fields},
                {"id": OLD, "state": "promoted", "label": "v0", **fields},
            ]
            return httpx2.Response(200, json={"data": data})
        state = {"id": "m", "revision": 1, "champion": self.champion, "aliases": {"v1.0": OLD}}
        return httpx2.Response(200, json={name: value for name, value in state.items() if value is not None})


def test_the_champion_gets_a_name() -> None:
    registry = Registry()
    assert manager(registry).create_version("v1.1", why="after Tuesday") == OLD
    moves = {"v1.1": {"version": OLD, "expected": None}}
    assert registry.posted == [("/v1/models/m/aliases", {"moves": moves, "why": "after Tuesday"})]


def test_name_of_another_version_is_refused_by_the_registry() -> None:
    registry = Registry()
    registry.refuse = "alias v1.1 of m names something else now"
    with pytest.raises(ApiError, match="names something else"):
        manager(registry).create_version("v1.1", NEW)


def test_naming_the_champion_without_a_champion_is_refused() -> None:
    with pytest.raises(UsageError, match="no champion to name v1"):
        manager(Registry(champion=None)).create_version("v1")


def test_rollback_promotes_the_named_version() -> None:
    registry = Registry()
    manager(registry).rollback("v1.0")
    assert registry.posted == [("/v1/models/m/promote", {"version": OLD, "force": True})]
    assert manager(registry).version("v0") == manager(registry).version(OLD) == OLD
    with pytest.raises(UsageError, match="no version 'v9'"):
        manager(registry).rollback("v9")


def test_ab_test_begins_a_rollout_against_the_champion() -> None:
    registry = Registry()
    manager(registry).create_ab_test("v1.0", NEW, "3/10")
    ((path, body),) = registry.posted
    assert path == "/v1/models/m/rollouts"
    assert (body["version"], body["kind"], body["share"]) == (NEW, "ab", "3/10")
    with pytest.raises(UsageError, match="is not the champion"):
        manager(registry).create_ab_test(NEW, "v1.0")
