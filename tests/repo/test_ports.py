"""Ports that tests listen on are never those of another test."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support import presence, processes
from tests.support.kafka_node import KafkaNode

_FEW = (31_000, 31_020)


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_RANGE", _FEW)
    monkeypatch.setattr(processes, "_assigned", set())


def as_worker(monkeypatch: pytest.MonkeyPatch, worker: int, workers: int) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", f"gw{worker}")
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))


def test_no_port_is_given_twice_by_any_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    assigned: list[int] = []
    for worker in (0, 1):
        as_worker(monkeypatch, worker, 2)
        assigned += [processes.free_port() for _ in range(7)]
    assert len(assigned) == len(set(assigned))
    assert all(_FEW[0] <= port < _FEW[1] for port in assigned)


def test_a_seed_that_a_test_sets_makes_no_ports() -> None:
    drawn = []
    for _ in range(5):
        random.seed(0)
        drawn.append(processes.free_port())
        processes._assigned.clear()
    assert len(set(drawn)) > 1, "once in 160,000 runs they are equal by chance"


@pytest.mark.kafka
def test_a_server_that_cannot_begin_says_why(tmp_path: Path) -> None:
    """Seen in CI: Kafka would not format its folder, and the reason was lost."""
    presence.need("kafka")
    node = KafkaNode(tmp_path)
    node._controller_port = node.port
    with pytest.raises(AssertionError, match="two listeners on the same port"):
        node._format()
