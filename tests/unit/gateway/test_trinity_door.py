"""The port that clients of Trinity-RFT expect: `/chat`, `/feedback` and `/commit` there, beside everything else."""

from __future__ import annotations

from pathlib import Path

import httpx2
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from headrace_gateway.app import trinity_door
from headrace_gateway.settings import GatewaySettings
from headrace_schemas import Feedback
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import gateway, until
from tests.support.ports import free_port


async def test_chat_has_a_short_name(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        await until(lambda: served.publisher.connected)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": False}
        answer = await served.client.post("/chat", json=body)
        assert answer.status_code == 200
        (turn,) = served.turns
        assert turn.turn_id == answer.json()["id"]
        said = {"msg_ids": [turn.turn_id], "reward": 1.0, "task_id": "t", "run_id": "0"}
        assert (await served.client.post("/feedback", json=said)).json() == {"status": "success"}
        assert served.bus.events(Feedback)[0].msg_ids == (turn.turn_id,)


async def test_the_same_pages_are_at_a_second_port_when_it_is_asked_for() -> None:
    app = Starlette(routes=[Route("/commit", lambda _: JSONResponse({"status": "success"}), methods=["POST"])])
    port = free_port()
    async with trinity_door(app, GatewaySettings(port=0, trinity_port=port)) as opened, httpx2.AsyncClient() as client:
        assert opened == port
        assert (await client.post(f"http://127.0.0.1:{port}/commit")).json() == {"status": "success"}


async def test_there_is_none_otherwise() -> None:
    async with trinity_door(Starlette(), GatewaySettings()) as opened:
        assert opened == 0
