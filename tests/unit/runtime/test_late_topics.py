"""A cluster acknowledges a topic before all of its brokers know it; a created topic can be used afterwards."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace_runtime.errors import Unavailable
from headrace_runtime.kafka import topics
from headrace_runtime.settings.sections import BusSettings


class LateCluster:
    """A cluster, and its own client, that creates topics at once and shows them at the `shown_at`th look."""

    def __init__(self, shown_at: int) -> None:
        self._shown_at, self.looks = shown_at, 0
        self.made: list[str] = []

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    async def list_topics(self) -> list[str]:
        self.looks += 1
        return self.made if self.looks >= self._shown_at else []

    async def create_topics(self, new: list[Any], **_how: object) -> Any:
        self.made = [topic.name for topic in new]
        return SimpleNamespace(topic_errors=())


async def ensured(monkeypatch: pytest.MonkeyPatch, cluster: LateCluster, timeout_s: float) -> None:
    async def nothing(*_arguments: object) -> None: ...

    monkeypatch.setattr(topics, "AIOKafkaAdminClient", lambda **_how: cluster)
    monkeypatch.setattr(topics, "_check", nothing)
    await topics.ensure(BusSettings(start_timeout_s=timeout_s), ("turns", "feedback"))


async def test_what_was_created_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = LateCluster(shown_at=3)
    await ensured(monkeypatch, cluster, 30.0)
    assert cluster.looks == 3
    assert set(cluster.made) == {"turns", "feedback"}


async def test_topics_that_never_show_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=r"has created (feedback, turns|turns, feedback) but does"):
        await ensured(monkeypatch, LateCluster(shown_at=1000), 0.1)
