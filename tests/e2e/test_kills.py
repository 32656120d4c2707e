"""kill -9 of each service in turn while a shortened `headrace demo` plays: it comes back, and the demo succeeds."""

from __future__ import annotations

import pytest

from tests.e2e.circle import CACHE, EXAMPLES
from tests.e2e.killed_demo import GAIN, KilledDemo, Played, endless
from tests.support.fake_llm import FakeLLM

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

ORDER = ("collector", "broker", "scorer", "gateway", "judge", "inference", "trainer", "registry")
EVALUATE = ["{python}", "-m", "email_agent.evaluate", "--base-url", "{base_url}", "--gate", "--tasks", "48"]


@pytest.fixture(scope="module")
def demo(judge_llm: FakeLLM, tmp_path_factory: pytest.TempPathFactory) -> KilledDemo:
    """The example's demo with its own base model and settings, a judge to kill, and half as many held-out tasks."""
    folder = tmp_path_factory.mktemp("killed")
    settings: dict[str, object] = {
        "bus.session_timeout_s": 6,  # the dead are missed sooner
        "registry.gate.command": EVALUATE,
        "registry.gate.audit_tasks": 48,
        "judge.endpoint.base_url": judge_llm.base_url,
        "judge.endpoint.model": "judge-1",
    }
    example = endless(EXAMPLES / "email_agent", folder / "email_agent")
    return KilledDemo(example, folder, CACHE, settings, {"judge": lambda: len(judge_llm.calls)})


@pytest.fixture(scope="module")
def played(demo: KilledDemo) -> Played:
    return demo.play(ORDER)


@pytest.mark.parametrize("service", ORDER)
def test_a_killed_service_comes_back_and_goes_on(played: Played, service: str) -> None:
    death = played.deaths[service]
    print(f"{service} was ready again after {death.back_after_s:.1f} s")
    assert death.successor not in (None, death.pid)
    assert f"{service} ended (signal 9); starting it again" in played.output
    assert death.told_again, "what it does shows on the bus again"


def test_the_demo_succeeds_all_the_same(played: Played) -> None:
    assert played.status == 0, played.output[-3000:]
    assert played.report["swaps"] >= 1
    assert played.report["after"] >= played.report["before"] + GAIN


def test_no_request_of_the_agent_failed(played: Played) -> None:
    assert played.agent["failures"] == []
    assert played.report["failed_requests"] == 0


def test_the_ledger_adds_up(played: Played) -> None:
    report = played.report
    dropped = sum(report["turns_dropped"].values())
    assert report["turns_captured"] == report["turns_trained"] + report["turns_waiting"] + dropped
    assert report["account_problems"] == []
    assert report["turns_captured"] >= played.agent["calls"], "whatever the agent was answered has been captured (P1)"
    assert report["turns_trained"] > 0


def test_nothing_is_left(demo: KilledDemo, played: Played) -> None:
    assert demo.left == {}
