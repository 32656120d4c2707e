"""Heartbeats of a replica fit the event, whatever the replica has to report.

The answer forms that a replica announces depend on the tokenizers of its versions.

Replicas report from which tokens an answer was sampled, so that the trainer can compute the same distribution.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from unittest import mock

import httpx
import structlog

from headrace_inference.announce import Announcer
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.fleet import Fleet, FleetLimits
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.clock import SystemClock
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.storage.versions import VersionCache
from headrace_schemas import LoadedVersion, Replica, TokenGrammar
from headrace_schemas.events.allowed_tokens import check_sets, iterate_sets
from headrace_schemas.events.routing import LoadState
from headrace_schemas.values.base import utcnow
from tests.unit.inference.conftest import Models
from tests.unit.inference.scripted import Json, client
from tests.unit.inference.test_fleet import Rig
from tests.unit.inference.test_grammars import FORMAT, RealEngine, ask_real


async def test_a_heartbeat_names_the_ready_versions_when_there_are_more_than_it_holds() -> None:
    counts: dict[LoadState, int] = {"failed": 50, "draining": 10, "loading": 10, "ready": 8}
    states = [state for state, count in counts.items() for _ in range(count)]
    versions = tuple(LoadedVersion(version=f"m@{number:016x}", state=state) for number, state in enumerate(states))
    now, producer = utcnow(), mock.AsyncMock(spec=EventProducer)
    identity = Replica(
        time=now, replica_id="r", url="http://127.0.0.1:1", engine="e", capacity=1, ttl_s=1.0, started_at=now
    )
    announcer = Announcer(producer, SystemClock(), identity, lambda: versions, lambda: 0, 1.0, asyncio.Event())
    await announcer.announce()
    (heartbeat,) = producer.send.await_args.args
    received = Replica.from_json(heartbeat.to_json())
    assert [version.state for version in received.versions] == [
        *["ready"] * 8, *["draining"] * 10, *["loading"] * 10, *["failed"] * 36
    ]  # fmt: skip


async def test_a_tokenizer_that_disagrees_with_the_grammar_takes_the_ability_from_the_heartbeat(
    models: Models, tmp_path: Path
) -> None:
    """And gives it back with the version; the version itself answers all that needs no form."""
    limits = FleetLimits(versions_max=4, drain_s=0.01, retry_s=0.01)
    rig = Rig(models, tmp_path / "cache")
    checked: list[int] = []

    def check(_tokenizer: object, vocabulary: int) -> str:
        checked.append(vocabulary)
        return "its tokens are not what they seem"

    rig.fleet = Fleet(rig.engine, VersionCache(models.blobs, tmp_path / "cache"), limits, rig.news.set, check)
    assert rig.fleet.holds_forms()
    rig.route(models.first.served)
    with structlog.testing.capture_logs() as logs:
        await rig.until(lambda: rig.states.get(models.first.version) == "ready")
    assert not rig.fleet.holds_forms()
    assert checked == [320]
    assert [entry["reason"] for entry in logs if entry["event"] == "forms_not_held"] == [check(None, 320)]
    rig.route()
    await rig.until(lambda: not rig.states)
    assert rig.fleet.holds_forms()
    await rig.fleet.close()


def chunks_of(response: httpx.Response) -> list[Json]:
    return [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]


async def test_answers_report_the_tokens_that_they_were_sampled_from(
    engine: TorchEngine, models: Models, tokenizer: ChatTokenizer
) -> None:
    """The grammar is in the whole answer or the first chunk, and stored sets are with their tokens."""
    ids: Json = {"return_token_ids": True, "max_tokens": 12}
    async with client(RealEngine(tokenizer, engine, models.first.version), tokenizer) as http:
        complete = (await ask_real(http, response_format=FORMAT, **ids)).json()
        grammar = TokenGrammar.model_validate(complete["headrace_grammar"])
        assert (grammar.library, grammar.vocabulary) == ("llguidance", 320)
        assert {*grammar.stop_ids} == tokenizer.stop_ids
        first, *later = chunks_of(await ask_real(http, response_format=FORMAT, stream=True, **ids))
        assert first["headrace_grammar"] == complete["headrace_grammar"]
        assert not any("headrace_grammar" in chunk for chunk in later)
        begun = {
            "choices": [{"index": 0, "token_ids": complete["choices"][0]["token_ids"][:3], "logprobs": [-1.0] * 3}]
        }
        (opening, *_) = chunks_of(
            await ask_real(http, response_format=FORMAT, stream=True, headrace_resume=begun, **ids)
        )
        assert opening["headrace_grammar"] == complete["headrace_grammar"]
        (truncated,) = (await ask_real(http, top_k=3, **ids)).json()["choices"]
        check_sets(truncated["headrace_stored_sets"], truncated["token_ids"])
        assert all(len(allowed) == 3 for allowed in iterate_sets(truncated["headrace_stored_sets"]))
        deltas = [chunk["choices"] for chunk in chunks_of(await ask_real(http, top_k=3, stream=True, **ids))]
        streamed = [n for choices in deltas for choice in choices for n in choice.get("headrace_stored_sets", ())]
        assert streamed == truncated["headrace_stored_sets"]
        assert "headrace" not in (await ask_real(http, **ids)).text
        assert "headrace" not in (await ask_real(http, response_format=FORMAT, top_k=3, max_tokens=12)).text
