"""`Listener` reads decisions of the registry from a real bus, and `line` formats them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headrace.decisions import Listener, line
from headrace_runtime.kafka import topics
from headrace_runtime.settings.sections import BusSettings
from headrace_schemas import ModelEvent
from tests.support.broker_process import BrokerProcess
from tests.support.gateway_process import bus_view
from tests.support.processes import wait_until

NEW, OLD = "m@0fffffffffff", "m@0123456789ab"


def event(decision: str, reason: str | None = None, number: int = 0, **statistics: float) -> ModelEvent:
    fields = {"time": datetime(2026, 1, 1, tzinfo=UTC), "decision_id": f"{decision}-{number}", "model": "m"}
    return ModelEvent.model_validate(
        {**fields, "version": NEW, "previous": OLD, "decision": decision, "reason": reason, "statistics": statistics}
    )


@pytest.mark.parametrize(
    ("decided", "expected"),
    [
        (
            event("evaluated", score=0.75, tasks=20, score_standard_error=0.1),
            f"{NEW} is measured: score 0.750 ± 0.100 on 20 audit tasks",
        ),
        (event("evaluated", score=0.5, tasks=3), f"{NEW} is measured: score 0.500 on 3 audit tasks"),
        (
            event("rejected", "inferior", difference=-0.25, standard_error=0.1, tasks=20),
            f"{NEW} is refused: inferior (-0.250 ± 0.100 on 20 gate tasks)",
        ),
        (event("promoted", "not inferior"), f"{NEW} takes over from {OLD}: not inferior"),
        (event("rejected", "inferior"), f"{NEW} is refused: inferior"),
        (event("rolled_back", "complaints"), f"{NEW} is taken back, {OLD} serves again: complaints"),
        (event("withdrawn"), f"{NEW} is withdrawn"),
        (event("registered"), None),
        (event("probed"), None),
    ],
)
def test_line_formats_a_decision(decided: ModelEvent, expected: str | None) -> None:
    assert line(decided) == expected


@pytest.mark.long
def test_listener_delivers_new_decisions_once_across_an_outage(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "broker")
    broker.start()
    decision_ids: list[str] = []

    async def publish(*events: ModelEvent) -> None:
        async with bus_view(broker.address, tmp_path) as view:
            for decision in events:
                await view.producer.send(decision)

    listener = Listener(broker.address, lambda decided: decision_ids.append(decided.decision_id))
    try:
        asyncio.run(topics.ensure(BusSettings(address=broker.address)))
        asyncio.run(publish(event("promoted", number=0)))
        listener.start()
        wait_until(lambda: listener._next_offsets is not None, 30, "the listener knows the end offsets")
        asyncio.run(publish(event("promoted", number=1), event("rejected", number=2)))
        wait_until(lambda: len(decision_ids) == 2, 30, "two decisions")
        broker.kill()
        broker.start()
        asyncio.run(publish(event("promoted", number=3)))
        wait_until(lambda: len(decision_ids) == 3, 60, "the one after the outage")
        assert decision_ids == ["promoted-1", "rejected-2", "promoted-3"]
    finally:
        listener.stop()
        broker.stop()


def test_listener_stops_while_the_bus_is_unreachable() -> None:
    listener = Listener("127.0.0.1:1", lambda _decided: None)
    listener.start()
    listener.stop()
