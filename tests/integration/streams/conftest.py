"""Fixture for the two deployments of the stream services: on a laptop, and on several machines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.integration.streams.rig import StreamsRig, rig_on


@pytest.fixture(
    params=["laptop", pytest.param("cluster", marks=[pytest.mark.kafka, pytest.mark.postgres, pytest.mark.long])]
)
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[StreamsRig]:
    """Yield a rig before its start: embedded broker, SQLite and single services, or Kafka, PostgreSQL and two of
    each."""
    laptop = request.param == "laptop"
    bus: str = request.getfixturevalue("embedded_bus" if laptop else "kafka_bus")
    url: str = "sqlite" if laptop else request.getfixturevalue("postgres").url()
    async with rig_on(bus, tmp_path, url, replicas=1 if laptop else 2) as streams:
        yield streams
