"""A value of a wrong JSON type, at any place of any body, is refused by name or taken; the gateway never fails."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from headrace_gateway import chat_request
from headrace_gateway.chat_request import ChatRequest
from headrace_gateway.feedback_request import FeedbackRequest, TrinityCommit, TrinityFeedback
from headrace_gateway.messages_api.request import MessagesRequest
from headrace_gateway.responses_api import request as responses_request
from headrace_gateway.responses_api.request import ResponsesRequest
from headrace_gateway.settings import LimitSettings
from headrace_schemas import Trajectory
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import gateway, until
from tests.support.hostile_json import bases, kinds_everywhere

WIDE = LimitSettings(requests_per_s=1e6, burst=1_000_000)
MODELS: dict[str, type[BaseModel]] = {
    "/v1/feedback": FeedbackRequest,
    "/feedback": TrinityFeedback,
    "/commit": TrinityCommit,
    "/v1/trajectories": Trajectory,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
OTHER_NAMES = {
    "/v1/chat/completions": (*chat_request.NEUTRAL, *chat_request.HARMLESS),
    "/v1/responses": (*responses_request.NEUTRAL, *chat_request.HARMLESS),
}


@pytest.mark.parametrize("kind", [{}, [], [[]], {"a": 1}, 7, None], ids=str)
@pytest.mark.parametrize(
    ("route", "field", "item"),
    [
        ("/v1/responses", "input", lambda kind: {"role": "user", "content": [{"type": kind, "text": "q"}]}),
        ("/v1/responses", "input", lambda kind: {"type": kind, "role": "user", "content": "q"}),
        ("/v1/responses", "input", lambda kind: {"role": kind, "content": "q"}),
        ("/v1/chat/completions", "messages", lambda kind: {"role": "user", "content": [{"type": kind}]}),
        ("/v1/chat/completions", "messages", lambda kind: {"role": kind, "content": "q"}),
    ],
)
async def test_a_type_or_a_role_that_is_no_text_is_refused_by_name(
    tmp_path: Path, route: str, field: str, item: Any, kind: Any
) -> None:
    async with gateway(tmp_path) as served:
        answer = await served.client.post(route, json={"model": "tiny", field: [item(kind)]})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(field)


@pytest.mark.parametrize(("route", "body"), bases(), ids=lambda value: value if isinstance(value, str) else "")
async def test_no_value_of_another_type_fails_the_gateway(tmp_path: Path, route: str, body: dict[str, Any]) -> None:
    replica = FakeReplica(grammars=("response_format", "tool_choice"))
    names = (*MODELS[route].model_fields, *OTHER_NAMES.get(route, ()))
    statuses: Counter[int] = Counter()
    async with replica.running(), gateway(tmp_path, replica, limits_per_key=WIDE, limits_total=WIDE) as served:
        await until(lambda: served.publisher.connected)
        for changed in kinds_everywhere(body, names):
            answer = await served.client.post(route, json=changed)
            assert answer.status_code in {200, 202, 400, 403, 404, 422}, (json.dumps(changed), answer.text)
            statuses[answer.status_code] += 1
            if answer.status_code >= 400:
                error = answer.json()["error"]
                assert error.get("param") or any(name in error["message"] for name in (*names, "body")), (
                    changed,
                    error,
                )
        assert (await served.client.post(route, json=body)).status_code in (200, 202)
    assert statuses[400] + statuses[422] > 10, statuses
