"""Large and hostile bodies delay no other client, and tenants do not share the caches of replicas."""

from __future__ import annotations

import hashlib
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from headrace_gateway.access import KeyRing
from headrace_gateway.capture import capture
from headrace_gateway.chat_request import ChatRequest, parse_chat
from headrace_gateway.refusals import ApiError
from headrace_gateway.settings import LimitSettings
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import gateway
from tests.support.requests import strict

USER = {"role": "user", "content": "hello"}
SHAPES: dict[str, bytes] = {
    "values": b'{"metadata":{"a":[' + b"0," * 300_000 + b"0]}}",
    "keys": ("{" + ",".join(f'"k{i}":1' for i in range(200_000)) + "}").encode(),
    "messages": json.dumps({"model": "tiny", "messages": [USER] * 60_000}).encode(),
    "parts": json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 60_000}]}
    ).encode(),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_too_many_values_are_refused_before_they_are_parsed(shape: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_chat(SHAPES[shape], strict(4, 32_768))
    assert (refused.value.status, refused.value.code) == (413, "too_many_values")
    assert "gateway.json_values_max" in str(refused.value)


async def test_a_large_request_is_read_beside_the_loop_and_a_small_one_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def parse(*given: Any) -> ChatRequest:
        threads.append(threading.current_thread().name)
        return parse_chat(*given)

    def capture_in_thread(*given: Any, **more: Any) -> Any:
        threads.append(threading.current_thread().name)
        return capture(*given, **more)

    monkeypatch.setattr("headrace_gateway.chat.parse_chat", parse)
    monkeypatch.setattr("headrace_gateway.chat.capture", capture_in_thread)
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as running:
        for words in (1, 5_000, 100_000):
            answer = await running.chat("1, 2, 3 " * words)
            assert answer.status_code == 200, answer.text[:300]
    main = threading.current_thread().name
    assert threads[:2] == [main, main]
    assert all(name.startswith("worker_") for name in threads[2:4])
    assert all(name.startswith("worker-large") for name in threads[4:])


async def test_replicas_hear_a_salt_for_each_tenant_and_never_its_name(tmp_path: Path) -> None:
    keys = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": tenant}
        for name, tenant in (("one", "acme"), ("another", "acme"), ("other", "globex"))
    ]
    salts: dict[str, str] = {}
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica, keys=keys) as running:
        for name in ("one", "another", "other"):
            answer = await running.chat(headers={"authorization": f"Bearer {name}"})
            assert answer.status_code == 200
            salts[name] = replica.requests[-1]["cache_salt"]
    assert salts["one"] == salts["another"] != salts["other"]
    assert all(len(salt) == 32 and not {"acme", "globex"} & {salt} for salt in salts.values())


def test_a_salt_cannot_be_computed_without_the_internal_key() -> None:
    rings = [KeyRing((), LimitSettings(), internal_key) for internal_key in ("", "secret", "secret", "other")]
    salts = [ring.cache_salt("acme") for ring in rings]
    assert salts[1] == salts[2]
    assert len(set(salts)) == 3
