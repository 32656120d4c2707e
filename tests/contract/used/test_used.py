"""What our runtime uses of a bus, held against each bus that it may meet: the fake keeps what the real ones promise."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.contract.used.ground import Scenario
from tests.contract.used.grounds import play_for_real, play_simulated
from tests.contract.used.hosting import hosts_beside_each_other
from tests.contract.used.planted import PLANTED, a_full_batch, acknowledge_backwards
from tests.contract.used.reading import READING
from tests.contract.used.sending import SENDING

FIXED_SEEDS = range(25)
RANDOM_SEEDS = 5
"""In every run, others in each."""
SCENARIOS: tuple[Scenario, ...] = (*SENDING, *READING, hosts_beside_each_other)
Play = Callable[[Scenario], None]


@pytest.fixture(params=["simulated", "embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def play(request: pytest.FixtureRequest, tmp_path: Path) -> Play:
    """Plays a scenario on one bus, the simulated one with many seeds."""
    chance = random.SystemRandom()
    if request.param == "simulated":
        return lambda scenario: _simulated(
            scenario, [*FIXED_SEEDS, *(chance.getrandbits(32) for _ in range(RANDOM_SEEDS))]
        )
    address = request.getfixturevalue(f"{request.param}_bus")
    seed = chance.getrandbits(32)
    print(f"seed {seed}")
    return lambda scenario: play_for_real(scenario, address, tmp_path, seed)


def _simulated(scenario: Scenario, seeds: list[int]) -> None:
    for seed in seeds:
        print(f"seed {seed}")
        play_simulated(scenario, seed)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_bus_keeps_it(play: Play, scenario: Scenario) -> None:
    play(scenario)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_noticed(name: str) -> None:
    planted = PLANTED[name]
    for seed in FIXED_SEEDS:
        try:
            with planted.plant():
                play_simulated(planted.caught_by, seed)
        except (AssertionError, TimeoutError):
            return
    pytest.fail(f"{len(FIXED_SEEDS)} seeds did not show it")


def test_acknowledging_out_of_order_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulated host is harsher than Faust here, so that nobody comes to rely on Faust's way with gaps."""
    monkeypatch.setattr("headrace_runtime.faust_host.FaustHost._work", acknowledge_backwards)
    with pytest.raises(ExceptionGroup) as stopped:
        play_simulated(a_full_batch, 0)
    assert stopped.group_contains(AssertionError, match="not acknowledged in order")
