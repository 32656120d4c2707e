"""The concurrency that file descriptors allow."""

from __future__ import annotations

import resource

import pytest

from headrace_gateway.descriptors import within_descriptors
from headrace_gateway.settings import GatewaySettings, LimitSettings


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Soft and hard limit of the process, as the system would keep them."""
    limits = [1024, 4096]

    def put(_what: int, both: tuple[int, int]) -> None:
        assert both[0] <= both[1] or both[1] == resource.RLIM_INFINITY
        limits[:] = both

    monkeypatch.setattr(resource, "getrlimit", lambda _what: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", put)
    return limits


def test_the_process_asks_for_what_it_needs(given: list[int]) -> None:
    limits = LimitSettings(concurrency=1000)
    assert within_descriptors(limits) == limits
    assert given == [2128, 4096]


def test_what_the_system_does_not_give_lowers_the_concurrency(given: list[int]) -> None:
    fits = within_descriptors(GatewaySettings().limits_total)
    assert fits.concurrency == (4096 - 128) // 2
    assert given == [4096, 4096]


@pytest.mark.parametrize("soft", [100_000, resource.RLIM_INFINITY])
def test_what_is_enough_is_left_alone(given: list[int], soft: int) -> None:
    given[:] = [soft, resource.RLIM_INFINITY]
    limits = GatewaySettings().limits_total
    assert within_descriptors(limits) == limits
    assert given == [soft, resource.RLIM_INFINITY]


def test_one_caller_may_not_take_all_places_and_replicas_have_connections_for_all() -> None:
    settings = GatewaySettings()
    assert settings.limits_per_key.concurrency < settings.limits_total.concurrency
    assert settings.upstream.connections_max >= settings.limits_total.concurrency
