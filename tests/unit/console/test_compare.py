"""Tests of the page that compares two turns side by side."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace_console.sources import clients
from headrace_console.sources.clients import RegistryReader
from headrace_runtime.errors import Refused
from headrace_schemas import Event, Message
from headrace_schemas.events.routing import LoadedVersion
from headrace_schemas.http.registry_api import ModelState, VersionState
from headrace_schemas.values.ids import response_id, session_key
from tests.support.turns import START, VERSION
from tests.unit.console.support import BY_PAGE, Stand, form_token
from tests.unit.console.test_learned import FIRST, Session, saved
from tests.unit.console.test_sessions import HOSTILE, KEY, TURN_ID, apply, foreign_events
from tests.unit.console.test_tokens import announce, answer, fill, heartbeat, sampled, two_turns


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    async with Stand(tmp_path, tenants=("default",)) as opened:
        yield opened


async def test_page_shows_both_answers_and_what_training_made_of_them(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, other = Session("a"), response_id(KEY)
    (turn_id,) = session.turn_ids
    hostile = answer((3, 4), (-1.0, -3.0), message=Message(role="assistant", content=f"left {HOSTILE}"))
    left = sampled((1, 2), hostile, turn_id=turn_id, session_key=session.key)
    right = sampled((1, 2), answer((5,), (-0.5,)), turn_id=other, version=FIRST)
    different = sampled((1, 9), answer((5,), (-0.5,)), turn_id=TURN_ID)
    events = [left, *session.events[1:], right, different, saved(FIRST, 3, session.outcome(-0.5))]
    await fill(stand, events, monkeypatch)
    client = await stand.signed_in()
    page = (await client.get("/compare", params={"left": turn_id, "right": other})).text
    first, second = page.split("<section")[1:]
    for text in ("left &lt;script&gt;", "mean probability 0.135", "This answer was pushed down, advantage -0.5, by"):
        assert text in first, text
    for text in (FIRST[:14], "mean probability 0.607", "No step has trained this answer"):
        assert text in second, text
    assert "Both prompts have the same tokens." in page
    assert "<script>alert" not in page
    assert "\u202e" not in page
    page = (await client.get("/compare", params={"left": turn_id, "right": TURN_ID})).text
    assert "The prompts have different tokens." in page


async def test_page_without_ids_is_a_form_and_with_one_id_shows_its_turn(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(stand, [sampled((1,), answer((3,), (-0.5,)))], monkeypatch)
    client = await stand.signed_in()
    assert "Enter two response ids" in (await client.get("/compare")).text
    page = (await client.get("/compare", params={"left": TURN_ID})).text
    assert f'value="{TURN_ID}"' in page
    assert page.count("<section") == 1


async def test_turn_of_another_tenant_answers_like_an_unknown_one(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = foreign_events()
    await fill(stand, [sampled((1,), answer((3,), (-0.5,))), *events], monkeypatch)
    client = await stand.signed_in()
    replies = [
        await client.get("/compare", params={"left": TURN_ID, "right": name})
        for name in (events[0].event_id, response_id(KEY), "x")
    ]
    assert {reply.status_code for reply in replies} == {404}
    assert len({reply.text for reply in replies}) == 1
    assert (await client.get("/compare?middle=x")).status_code == 400
    rater = await stand.signed_in("rater")
    assert (await rater.get("/compare")).status_code == 403


OTHER = "m@00000000000000bb"


class Gateway:
    """Gateway substitute that answers by the requested version, and lets the console read the turn."""

    def __init__(self, stand: Stand) -> None:
        self.stand = stand
        self.requests: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        self.problem: Refused | None = None

    async def call(
        self, service: str, _method: str, url: str, headers: dict[str, str], content: bytes = b"", **_: Any
    ) -> bytes:
        if service != "gateway":
            raise Refused(503, f"{service}_away", "Only the gateway answers.")
        body = json.loads(content) if content else {}
        self.requests.append((url, headers, body))
        if url.endswith("/end"):
            return b"{}"
        if self.problem is not None:
            raise self.problem
        session = body["metadata"]["session_id"]
        key = session_key("default", session)
        name = response_id(key)
        new_turn = sampled(
            (1, 2), answer((5,), (-0.5,)), turn_id=name, session_key=key, session_id=session,
            version=body["model"], purpose="eval",
        )  # fmt: skip
        await apply(self.stand, [new_turn])
        return json.dumps({"id": name}).encode()


async def try_version(client: httpx2.AsyncClient, left: str, version: str = OTHER) -> httpx2.Response:
    form = {"form_token": await form_token(client), "left": left, "version": version}
    return await client.post("/compare/try", data=form, headers=BY_PAGE)


@pytest.fixture
def stub(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    stub = Gateway(stand)
    monkeypatch.setattr(clients, "call", stub.call)
    return stub


async def test_another_version_answers_the_same_prompt_as_evaluation(
    stand: Stand, stub: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    events = two_turns()
    await fill(stand, events, monkeypatch)
    announce(stand.console.replicas, heartbeat(scores=False, versions=(LoadedVersion(version=OTHER, state="ready"),)))
    reviewer, later = await stand.signed_in("reviewer"), events[1].event_id
    page = (await reviewer.get("/compare", params={"left": later})).text
    assert f"<option>{OTHER}</option>" in page
    reply = await try_version(reviewer, later)
    assert reply.status_code == 303, reply.text
    (url, headers, body), (end, _, _) = stub.requests
    assert url.endswith("/v1/chat/completions")
    assert headers["x-headrace-purpose"] == "eval", "so that no service trains the answer"
    assert (body["model"], body["max_tokens"]) == (OTHER, 1_024)
    assert [message["role"] for message in body["messages"]] == ["user", "assistant", "user"], "the whole conversation"
    assert end.endswith(f"/v1/sessions/{body['metadata']['session_id']}/end")
    comparison = (await reviewer.get(reply.headers["location"])).text
    assert comparison.count("<section") == 2
    assert OTHER[:14] in comparison
    listed = (await reviewer.get("/sessions", params={"evaluation": "shown"})).text
    assert re.search(r"<td>1 dropped</td><td>evaluation</td>", listed), "the turn is counted as evaluation"


async def test_answer_of_another_version_needs_a_reviewer_a_served_version_and_a_gateway(
    stand: Stand, stub: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    foreign = foreign_events()[0]
    await fill(stand, [sampled((1,), answer((3,), (-0.5,))), foreign], monkeypatch)
    viewer, reviewer = await stand.signed_in("viewer"), await stand.signed_in("reviewer")
    assert "Try another version" not in (await viewer.get("/compare", params={"left": TURN_ID})).text
    assert (await try_version(viewer, TURN_ID)).status_code == 403
    page = (await reviewer.get("/compare", params={"left": TURN_ID})).text
    assert "No replica serves a version of this model now." in page
    assert (await try_version(reviewer, TURN_ID)).status_code == 409
    announce(stand.console.replicas, heartbeat(versions=(LoadedVersion(version=OTHER, state="ready"),)))
    assert {(await try_version(reviewer, name)).status_code for name in (foreign.event_id, response_id(KEY))} == {404}
    assert (await try_version(reviewer, TURN_ID, "m@ffffffffffff")).status_code == 409
    assert stub.requests == []
    stub.problem = Refused(403, "gateway", "The gateway refuses this: this API key lacks the scope 'chat'")
    refused = await try_version(reviewer, TURN_ID)
    assert (refused.status_code, "lacks the scope" in refused.text) == (403, True)


async def test_read_only_console_requests_no_answer(tmp_path: Path, stub: Gateway) -> None:
    async with Stand(tmp_path / "read", read_only=True) as stand:
        assert (await try_version(await stand.signed_in("operator"), TURN_ID)).status_code == 403
    assert stub.requests == []


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the registry return two versions with audit scores, one of which the gate has rejected."""

    def version(name: str, step: int, score: float) -> VersionState:
        audit = {"decision": "evaluated", "statistics": {"score": score, "tasks": 200, "score_standard_error": 0.02}}
        gate = {"decision": "rejected", "previous": VERSION, "statistics": {"tasks": 90, "difference": -0.2}}
        decisions = [
            {"time": START, "decision_id": f"{name} {at}", "model": "m", "version": name, **entry}
            for at, entry in enumerate((audit, *([gate] if name == OTHER else [])))
        ]
        fields = {"id": name, "model": "m", "lineage": "main", "step": step, "state": "rejected"}
        return VersionState.model_validate({**fields, "registered_at": START, "decisions": decisions})

    async def versions(_registry: RegistryReader, _model: str) -> tuple[VersionState, ...]:
        return version(OTHER, 2, 0.4), version(VERSION, 1, 0.6)

    async def model(_registry: RegistryReader, name: str) -> ModelState:
        return ModelState(id=name, champion=VERSION, revision=1)

    monkeypatch.setattr(RegistryReader, "versions", versions)
    monkeypatch.setattr(RegistryReader, "model", model)


async def test_a_version_has_its_audit_score(stand: Stand, registry: None) -> None:
    page = (await (await stand.signed_in()).get(f"/models/m/{OTHER.partition('@')[2]}")).text
    assert '<th scope="row">audit score</th><td>0.400, mean of 200 tasks</td>' in page


async def test_model_names_its_refused_versions(stand: Stand, registry: None) -> None:
    page = (await (await stand.signed_in()).get("/models/m")).text
    sentence = re.search(r"<p>Refused, (.*?)</p>", page)
    assert sentence is not None, page
    assert re.findall(r">(m@[0-9a-f]+)<", sentence[1]) == [OTHER[:14]]


async def test_two_versions_are_compared_by_scores_sessions_and_shared_tasks(
    stand: Stand, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[Event] = []
    for number in range(80):
        version, at = (VERSION, OTHER)[number % 2], number // 2
        call, run, trained = Session(f"s{number}").events
        reward = (at % 2) / 2 + (0.5 if version == VERSION else 0.0)
        labels = {"version": version, "task_id": f"{HOSTILE} {at}", "time": START + timedelta(seconds=at)}
        events += [call.model_copy(update=labels), run, trained.model_copy(update={"reward": reward})]
    await fill(stand, events, monkeypatch)
    client = await stand.signed_in()
    page = (await client.get(f"/models/m/{OTHER[2:]}/compare")).text
    assert f"<option selected>{VERSION}</option>" in page, "the champion, unless another version is chosen"
    difference = "000000000000 (step 2) is lower than 0123456789ab (step 1): "
    assert f"Audit score of {difference}-0.200 (95 %: -0.2" in page
    assert f"Mean reward of {difference}-0.500 (95 %: -0.6" in page
    rows = dict(re.findall(r'<tr><th scope="row">([^<]*)</th><td class="number">([^<]*)</td>', page))
    assert (rows["sessions"], rows["mean reward"], rows["audit score"]) == ("40", "0.250 ± 0.078", "0.400 ± 0.039")
    assert page.count("/compare?left=") == 20, "tasks that both have played"
    left, right = re.findall(r"/compare\?left=([^&]*)&amp;right=([^\"]*)", page)[0]
    assert (await client.get("/compare", params={"left": left, "right": right})).text.count("<section") == 2
    assert "<script>alert" not in page
    assert ">rejected<" in page, "the decision between them"
    assert "No stored session of each names the same task" not in page
    for path in (f"{OTHER[2:]}/compare?with=m@1", "ffffffffffff/compare", f"{OTHER[2:]}/compare?tenant=other"):
        assert (await client.get(f"/models/m/{path}")).status_code == 404


async def test_comparison_counts_the_turns_of_each_version_alone(
    stand: Stand, registry: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session("a", 3)
    *turns, run, trained = session.events
    versions = (VERSION, OTHER, OTHER)
    turns = [
        turn.model_copy(update={"version": version, "time": START + timedelta(seconds=at)})
        for at, (turn, version) in enumerate(zip(turns, versions, strict=True))
    ]
    await fill(stand, [*turns, run, trained, saved(OTHER, 3, session.outcome(0.5))], monkeypatch)
    page = (await (await stand.signed_in()).get(f"/models/m/{OTHER[2:]}/compare")).text
    cells = re.search(r'its turns trained, dropped</th><td class="number">([^<]*)</td><td class="number">([^<]*)', page)
    assert cells is not None
    assert cells.groups() == ("2, 0", "0, 0"), "the first turn is of the other version, which did not answer last"
    assert "No stored session of each names the same task" in page
