"""The schedule of strikes is a function of the seed, and spares nobody."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.chaos.nemeses import NEMESES
from tests.chaos.schedule import plan
from tests.chaos.victims import BUS, PAIRS, services_on, victims_on

ALL = [("kill", name) for name in victims_on("embedded")]


def pairs(bus: str) -> list[tuple[str, str]]:
    return [(name, victim) for name, nemesis in NEMESES.items() for victim in nemesis.victims(bus)]


def test_equal_seeds_give_equal_schedules() -> None:
    assert plan(7, 50, ALL, 3.0) == plan(7, 50, ALL, 3.0)
    assert plan(7, 50, ALL, 3.0) != plan(8, 50, ALL, 3.0)


def test_a_shorter_run_is_the_beginning_of_a_longer_one() -> None:
    assert plan(7, 50, ALL, 3.0)[:9] == plan(7, 9, ALL, 3.0)


@pytest.mark.parametrize("bus", BUS)
def test_every_service_and_the_bus_are_hit_alike(bus: str) -> None:
    hit = Counter((strike.nemesis, strike.victim) for strike in plan(7, 200, pairs(bus), 3.0))
    assert set(hit) == set(pairs(bus))
    assert max(hit.values()) - min(hit.values()) <= 1
    installed = {"gateway", "inference", "collector", "scorer", "judge", "trainer", "registry"}
    assert installed <= set(services_on(bus))
    assert set(victims_on(bus)) - set(services_on(bus)) == {"broker" if bus == "embedded" else "kafka"}


def test_a_second_of_each_stream_service_runs_where_the_database_is_a_server() -> None:
    assert {"collector-2", "scorer-2", "judge-2"} <= set(services_on("kafka"))
    assert not {"collector-2", "scorer-2", "judge-2"} & set(services_on("embedded"))


def test_pauses_are_bounded_and_often_shorter_than_a_restart() -> None:
    pauses = [strike.pause_s for strike in plan(7, 400, ALL, 3.0)]
    assert max(pauses) <= 12.0
    assert 2.5 < sum(pauses) / len(pauses) < 3.3
    assert sum(pause < 1.0 for pause in pauses) > 80, "several are down together"


def test_pairs_stand_in_for_each_other() -> None:
    assert all(PAIRS[PAIRS[name]] == name != PAIRS[name] for name in PAIRS)
