"""Tests of the registry as a process on a real bus: a version's life, kill -9, and a standby that takes over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from headrace_runtime.kafka.wire import Outgoing
from headrace_schemas import Checkpoint
from tests.integration.registry.rig import RegistryRig
from tests.support import postgres_node
from tests.support.broker_process import BrokerProcess
from tests.support.processes import is_open


@pytest.fixture(scope="module")
def own_bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the address of a broker for these tests alone, because the registry manages every model on its bus."""
    broker = BrokerProcess(tmp_path_factory.mktemp("broker"))
    broker.start()
    yield broker.address
    broker.stop()


@pytest.mark.long
async def test_promotion_survives_kill_9_in_the_middle_of_the_gate(own_bus: str, tmp_path: Path) -> None:
    rig = RegistryRig(own_bus, tmp_path)
    async with rig.open():
        process, url = rig.registry()
        first = await rig.publish("life", 0)
        await rig.until(lambda: rig.champion("life") == first, "the first champion")
        await rig.until(lambda: "evaluated" in rig.decisions_about(first), "its baseline")
        (tmp_path / "hold").touch()
        second = await rig.publish("life", 1, {"t": 0.75})
        await rig.until(lambda: set(rig.runs()[1:]) & {first, second}, "the trial's start")
        process.kill()
        process.wait()
        assert rig.champion("life") == first
        (tmp_path / "hold").unlink()
        await rig.producer.send_raw([Outgoing(Checkpoint.topic, b"life", b"{poison", ())])
        _, url = rig.registry()
        await rig.until(lambda: rig.champion("life") == second, "the second champion")
        assert len(rig.runs()) >= 4, "the trial is begun anew"
        await rig.until(lambda: rig.decisions_about(second)[-1] == "evaluated", "its audit")
        assert rig.decisions_about(second) == ["registered", "probed", "promoted", "evaluated"], "each once"
        async with httpx2.AsyncClient(base_url=url, timeout=10) as http:
            assert (await http.get("/v1/models/life")).json()["champion"] == second
            assert (await http.get("/health")).status_code == 200
            answer = await http.post("/v1/models/life/rollback")
            assert answer.json()["champion"] == first
        await rig.until(lambda: rig.champion("life") == first, "the rollback on the bus")


async def test_a_published_version_is_decided_at_once_and_not_at_the_next_poll(own_bus: str, tmp_path: Path) -> None:
    rig = RegistryRig(own_bus, tmp_path)
    rig.set({"HEADRACE_REGISTRY__POLL_S": "3600"})
    async with rig.open():
        rig.registry()
        first = await rig.publish("prompt", 0)
        await rig.until(lambda: "evaluated" in rig.decisions_about(first), "the first version's audit")
        second = await rig.publish("prompt", 1, {"t": 0.75})
        await rig.until(lambda: rig.champion("prompt") == second, "the second champion")


@pytest.mark.postgres
async def test_a_standby_takes_over_from_a_killed_leader(
    own_bus: str, tmp_path: Path, postgres: postgres_node.PostgresNode
) -> None:
    rig = RegistryRig(own_bus, tmp_path, postgres.empty_url())
    model = "standby"
    async with rig.open(), httpx2.AsyncClient(timeout=10) as http:
        processes = {url: process for process, url in (rig.registry(), rig.registry())}
        first = await rig.publish(model, 0)
        await rig.until(lambda: rig.champion(model) == first, "the first champion")
        await rig.until(lambda: all(is_open(httpx2.URL(url).port or 0) for url in processes), "both of them")
        answers = {url: await _leader(http, url) for url in processes}
        assert sorted(answers.values()) == ["model_not_found", "not_leader"]
        (leader,) = (processes[url] for url, code in answers.items() if code == "model_not_found")
        (standby,) = (url for url, code in answers.items() if code == "not_leader")
        assert (await http.get(f"{standby}/v1/models/{model}")).json()["champion"] == first
        leader.kill()
        leader.wait()
        second = await rig.publish(model, 1)
        await rig.until(lambda: rig.champion(model) == second, "the second champion")
        await rig.until(lambda: "promoted" in rig.decisions_about(second), "its events, which are another topic's")
        assert rig.decisions_about(second)[:3] == ["registered", "probed", "promoted"]


async def _leader(http: httpx2.AsyncClient, url: str) -> str:
    """Return the error code for an unknown model: only the leader looks up the model, a standby refuses first."""
    answer = await http.post(f"{url}/v1/models/nobody/rollback")
    code: str = answer.json()["error"]["code"]
    return code
