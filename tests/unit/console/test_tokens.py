"""Tests of the token view: colours, trained tokens, and probabilities under a version that is served now."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from headrace_console.sources import replicas as replica_source
from headrace_console.sources.replicas import ReplicaReader
from headrace_console.sources.tokenizers import TokenizerReader, TokenTexts
from headrace_console.token_lens import Lens, colour_class, forced_positions
from headrace_runtime.errors import Refused
from headrace_schemas import Choice, Event, Message, Replica, Turn, Usage
from headrace_schemas.events.checkpoint import TurnAdvantage
from headrace_schemas.events.routing import LoadedVersion
from headrace_schemas.events.turn import TurnReference
from headrace_schemas.http.replica_api import ScoredAnswers, ScoreRequest, TokensToScore
from headrace_schemas.rules.turn_history import token_digest
from headrace_schemas.values.ids import response_id
from tests.support.turns import START, VERSION, turn
from tests.unit.console.support import BY_PAGE, Stand, form_token
from tests.unit.console.test_learned import FIRST, Session, saved
from tests.unit.console.test_sessions import KEY, OTHER_KEY, TURN_ID, apply, foreign_events
from tests.unit.console.test_token_texts import byte_level


@pytest.mark.parametrize(
    ("colour", "then", "now", "expected"),
    [
        ("then", 0.0, None, "l0"), ("then", -0.6, None, "l1"), ("then", -1.0, None, "l2"), ("then", -2.5, None, "l3"),
        ("then", -4.0, None, "l4"), ("then", -9.0, None, "l5"), ("then", None, None, ""), ("now", -9.0, -0.01, "l0"),
        ("change", -1.0, None, ""), ("change", -1.0, -1.05, "z"), ("change", -1.0, -0.5, "u1"),
        ("change", -3.0, -0.5, "u2"), ("change", -1.0, -1.5, "d1"), ("change", -1.0, -3.0, "d2"),
    ],
)  # fmt: skip
def test_colour_follows_from_the_probabilities(
    colour: str, then: float | None, now: float | None, expected: str
) -> None:
    assert colour_class(colour, then, now) == expected


def answer(token_ids: Sequence[int], logprobs: Sequence[float], **more: Any) -> Choice:
    message = Message(role="assistant", content="x")
    fields = {"message": message, "token_ids": tuple(token_ids), "logprobs": tuple(logprobs), **more}
    return Choice(index=0, finish_reason="stop", **fields)


def sampled(prompt: Sequence[int], *choices: Choice, **more: Any) -> Turn:
    usage = Usage(prompt_tokens=len(prompt), completion_tokens=sum(len(choice.token_ids) for choice in choices))
    fields = {"prompt_token_ids": tuple(prompt), "choices": choices, "usage": usage, "session_key": KEY}
    return turn(more.pop("turn_id", TURN_ID), **{**fields, "session_id": "s1", **more})


def test_tokens_that_a_constraint_leaves_no_choice_are_forced() -> None:
    stored = answer((5, 6, 7), (0.0, -0.5, 0.0), stored_sets=(1, 5, 2, 6, 8, 1, 7))
    assert forced_positions(sampled((1,), stored), 0) == {0, 2}
    free = answer((5, 6), (0.0, -0.5))
    assert forced_positions(sampled((1,), free), 0) == (), "a certain token of free sampling was not forced"


def test_lens_shows_the_prompt_and_the_answer_in_windows() -> None:
    lens = Lens(sampled(range(2_000), answer((7,) * 3_000, (-1.0,) * 3_000)), 0, None)
    assert (lens.length, lens.first_window()) == (5_000, 1_500)
    tokens = lens.tokens(1_999, 2_001, "then")
    assert [(token.position, token.kind, token.then) for token in tokens] == [
        (1_999, "prompt", None),
        (2_000, "sampled", -1.0),
    ]
    assert len(lens.tokens(4_999, 9_000, "then")) == 1
    assert lens.tokens(9_000, 9_999, "then") == []


class Bus:
    """The console's bus, with records by topic and offset."""

    def __init__(self, events: Sequence[Event]) -> None:
        self.events = events

    async def read(self, topic: str, positions: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Event]:
        return {at: self.events[at[1]] for at in positions if self.events[at[1]].topic == topic}


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    async with Stand(tmp_path, tenants=("default",)) as opened:
        yield opened


async def fill(stand: Stand, events: Sequence[Event], monkeypatch: pytest.MonkeyPatch) -> None:
    """Store `events`, and let the console read their texts, with a byte-level tokenizer for all versions."""
    await apply(stand, events)
    texts = TokenTexts(byte_level().to_str().encode())

    async def tokenizer(_self: TokenizerReader, _version: str) -> tuple[TokenTexts, str]:
        return texts, ""

    monkeypatch.setattr(stand.console._records, "read", Bus(events).read)
    monkeypatch.setattr(TokenizerReader, "read", tokenizer)


async def address(stand: Stand, turn_id: str = TURN_ID) -> str:
    reply = await (await stand.signed_in()).get(f"/r/{turn_id}")
    key, _, number = reply.headers["location"].removeprefix("/s/").partition("#t-")
    return f"/s/{key.partition('?')[0]}/turns/{number}"


def ids_of(text: str) -> list[int]:
    return byte_level().encode(text).ids


async def test_page_shows_each_token_with_its_probability(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, reply = ids_of("Hello"), ids_of("<b>日\u202e")
    logprobs = [-0.01, *[-7.0] * (len(reply) - 1)]
    await fill(stand, [sampled(prompt, answer(reply, logprobs))], monkeypatch)
    client = await stand.signed_in()
    page = (await client.get(await address(stand))).text
    assert "<i>" in page
    cells = re.findall(r'<b class="(l[0-5])" title="sampled, id (\d+), p ([0-9.]+) then">([^<]*)</b>', page)
    assert [int(token_id) for _, token_id, _, _ in cells] == reply
    assert cells[0] == ("l0", str(reply[0]), "0.990", "&lt;")
    assert all(level == "l5" for level, *_ in cells[1:])
    assert "<b>日" not in page
    assert "\u202e" not in page
    assert "The sampled tokens were not trained." in page
    assert "Not served now" in page
    assert page.count('<td class="number">-7.000</td>') == len(reply) - 1, "the table has each number"


async def test_table_shows_white_space_between_quotation_marks(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = ids_of("a\n")
    await fill(stand, [sampled(ids_of("Hello"), answer(reply, [-0.01] * len(reply)))], monkeypatch)
    page = (await (await stand.signed_in()).get(await address(stand))).text
    assert re.findall(r'<td><code class="piece">([^<]*)</code></td>', page) == ["a", r'"\n"']


async def test_page_states_which_answer_is_in_the_loss(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session("a")
    (turn_id,) = session.turn_ids
    two = sampled((1, 2), answer((3,), (-0.5,)), answer((4,), (-0.5,)), turn_id=turn_id, session_key=session.key)
    events = [two, *session.events[1:], saved(FIRST, 3, session.outcome(0.5))]
    await fill(stand, events, monkeypatch)
    client, path = await stand.signed_in(), await address(stand, turn_id)
    page = (await client.get(path)).text
    assert "The sampled tokens are in the loss of a trained experience." in page
    assert f"This answer was pushed up, advantage +0.5, by step 3 of lineage main, first in {FIRST}." in page
    assert "The sampled tokens were not trained." in (await client.get(f"{path}?choice=1")).text


async def test_answer_of_which_an_edit_alone_was_trained_is_not_in_the_loss(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session("a")
    edit = TurnAdvantage(turn_id=session.turn_ids[0], advantage=1.0, edited=True)
    await fill(stand, [*session.events, saved(FIRST, 0, session.outcome(None, edit))], monkeypatch)
    page = (await (await stand.signed_in()).get(await address(stand, session.turn_ids[0]))).text
    assert "The sampled tokens were not trained." in page
    assert "An edit of this answer was pushed up" in page


@pytest.mark.parametrize("query", ["choice=1", "choice=x", "from=-1", "row=9999999", "colour=red", "other=1"])
async def test_page_refuses_unknown_values_by_name(stand: Stand, monkeypatch: pytest.MonkeyPatch, query: str) -> None:
    await fill(stand, [sampled((1,), answer((3,), (-0.5,)))], monkeypatch)
    reply = await (await stand.signed_in()).get(f"{await address(stand)}?{query}")
    assert reply.status_code == 400
    assert query.partition("=")[0] in reply.text


async def test_turns_of_another_tenant_and_unknown_turns_answer_alike(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(stand, [sampled((1,), answer((3,), (-0.5,))), *foreign_events()], monkeypatch)
    client = await stand.signed_in()
    token = await form_token(client)
    path_of_turn = await address(stand)
    for path in (f"/s/{OTHER_KEY}/turns/2", f"/s/{KEY}/turns/2", f"/s/{KEY}/turns/99", f"/s/{KEY}/turns/x"):
        page = await client.get(path)
        assert page.status_code == 404
        sent = await client.post(f"{path}/now", data={"form_token": token, "version": VERSION}, headers=BY_PAGE)
        assert sent.status_code == 404
    rater = await stand.signed_in("rater")
    assert (await rater.get(path_of_turn)).status_code == 403


def heartbeat(url: str = "http://127.0.0.1:9", **more: Any) -> Replica:
    fields: dict[str, Any] = {
        "time": START, "replica_id": "r", "url": url, "engine": "torch", "capacity": 4, "ttl_s": 10.0,
        "versions": (LoadedVersion(version=VERSION, state="ready"),), "started_at": START, "scores": True, **more,
    }  # fmt: skip
    return Replica(**fields)


def announce(source: ReplicaReader, replica: Replica) -> None:
    source.table.rows[replica.replica_id] = replica
    source._note(replica.replica_id, replica)


class FakeReplica:
    """Replica that answers `POST /v1/logprobs` with the logprobs -1, -2 and so on, and records the requests."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, surplus: int = 0) -> None:
        self.requests: list[ScoreRequest] = []
        self.urls: list[str] = []
        self.waits = asyncio.Event()
        self.waits.set()
        self._surplus = surplus
        monkeypatch.setattr(replica_source, "call", self.call)

    async def call(self, _service: str, _method: str, url: str, _headers: Any, body: bytes, **_: Any) -> bytes:
        await self.waits.wait()
        request = ScoreRequest.model_validate_json(body)
        self.requests.append(request)
        self.urls.append(url)
        length = len(request.answers[0].token_ids) + self._surplus
        logprobs = tuple(-float(at) for at in range(1, length + 1))
        return ScoredAnswers(logprobs=(logprobs,)).model_dump_json().encode()


def two_turns() -> list[Event]:
    """Return a complete turn, and a turn that extends it and contains only the end of its own prompt."""
    second = response_id(KEY)
    first = sampled((1, 2), answer((3, 4), (-0.5, -0.5)))
    shared = (1, 2, 3, 4)
    reference = TurnReference(turn_id=TURN_ID, tokens=4, messages=2, digest=token_digest(shared))
    usage = Usage(prompt_tokens=5, completion_tokens=2)
    later = sampled((9,), answer((7, 8), (-0.5, -3.0)), turn_id=second).model_copy(
        update={"extends": reference, "usage": usage, "time": START + timedelta(seconds=1)}
    )
    return [first, later]


async def test_click_shows_the_probabilities_of_a_served_version(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    events = two_turns()
    await fill(stand, events, monkeypatch)
    replica = FakeReplica(monkeypatch)
    announce(stand.console.replicas, heartbeat())
    client, path = await stand.signed_in(), await address(stand, events[1].event_id)
    assert f"<option>{VERSION}</option>" in (await client.get(path)).text
    assert replica.requests == [], "nothing is computed before the click"
    form = {"form_token": await form_token(client), "choice": "0", "version": VERSION}
    reply = await client.post(f"{path}/now", data=form, headers=BY_PAGE)
    assert reply.status_code == 303, reply.text
    (request,) = replica.requests
    (scored,) = request.answers
    assert (request.model, scored.prompt_token_ids, scored.token_ids) == (VERSION, (1, 2, 3, 4, 9), (7, 8))
    page = (await client.get(reply.headers["location"])).text
    for text in ('class="d1"', 'class="u1"', ">-0.500<", ">+1.000<", "p 0.607 then, 0.368 now"):
        assert text in page or (text == 'class="u1"' and 'class="u2"' in page), text
    stand.clock.now_s += 3_600
    assert "were not computed within the last hour" in (await client.get(reply.headers["location"])).text


async def test_click_without_a_replica_that_serves_the_version_is_refused(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    await fill(stand, two_turns(), monkeypatch)
    client, path = await stand.signed_in(), await address(stand)
    form = {"form_token": await form_token(client), "choice": "0", "version": VERSION}
    source = stand.console.replicas
    unable = [
        heartbeat(scores=False),
        heartbeat(stopping=True),
        heartbeat(versions=(LoadedVersion(version=VERSION, state="loading"),)),
        heartbeat(versions=(LoadedVersion(version="m@ffffffffffff", state="ready"),)),
    ]
    for replica in unable:
        announce(source, replica)
        reply = await client.post(f"{path}/now", data=form, headers=BY_PAGE)
        assert (reply.status_code, "is not served now" in reply.text) == (409, True)
    announce(source, heartbeat())
    stand.clock.now_s += 11
    assert (await client.post(f"{path}/now", data=form, headers=BY_PAGE)).status_code == 409, "its heartbeat is old"


async def test_one_request_for_probabilities_is_in_progress_at_a_time(
    stand: Stand, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, source = FakeReplica(monkeypatch), stand.console.replicas
    announce(source, heartbeat())
    replica.waits.clear()
    tokens = TokensToScore(prompt_token_ids=(1,), token_ids=(2,))
    first = asyncio.create_task(source.compute(("default", "a", 0, VERSION), tokens))
    await asyncio.sleep(0)
    with pytest.raises(Refused, match="in progress") as refusal:
        await source.compute(("default", "b", 0, VERSION), tokens)
    assert refusal.value.status == 429
    replica.waits.set()
    await first
    assert source.cached_logprobs(("default", "a", 0, VERSION)) == (-1.0,)
    assert source.cached_logprobs(("other", "a", 0, VERSION)) == ()
    assert replica.urls == ["http://127.0.0.1:9/v1/logprobs"]


async def test_long_answers_and_wrong_replies_are_refused(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeReplica(monkeypatch, surplus=1)
    source = stand.console.replicas
    announce(source, heartbeat())
    answer_key = ("default", "a", 0, VERSION)
    for tokens, status in (((1,) * 32_769, 413), ((1,), 502)):
        with pytest.raises(Refused) as refusal:
            await source.compute(answer_key, TokensToScore(prompt_token_ids=(), token_ids=tokens))
        assert refusal.value.status == status
    assert source.cached_logprobs(answer_key) == ()


async def test_kept_probabilities_are_bounded(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    FakeReplica(monkeypatch)
    source = stand.console.replicas
    announce(source, heartbeat())
    for number in range(17):
        tokens = TokensToScore(prompt_token_ids=(1,), token_ids=(2,))
        await source.compute(("default", f"t{number}", 0, VERSION), tokens)
    assert source.cached_logprobs(("default", "t0", 0, VERSION)) == ()
    assert source.cached_logprobs(("default", "t16", 0, VERSION)) == (-1.0,)
