"""Aliases move by compare-and-swap, all of a request or none, whoever else moves them."""

from __future__ import annotations

import asyncio
import random

import pytest
from sqlalchemy import update

from headrace_registry.catalog import audit, queries
from headrace_registry.leader import LostLeadership
from headrace_registry.tables import LEASE
from headrace_runtime.errors import Unavailable
from headrace_schemas import Routing
from headrace_schemas.catalog import AuditList
from tests.unit.registry.catalog.desk import OPPONENT, Desk, refusal


async def move(desk: Desk, **moves: tuple[str | None, str | None]) -> tuple[int, str]:
    """Alias to (expected, version); status and text."""
    body = {alias: {"expected": expected, "version": version} for alias, (expected, version) in moves.items()}
    answer = await desk.post(f"models/{OPPONENT}/aliases", moves=body, why="because")
    return answer.status_code, answer.text


async def aliases(desk: Desk) -> dict[str, str]:
    async with desk.rig.database.transaction() as tx:
        return await queries.aliases(tx, OPPONENT)


async def test_an_alias_is_set_moved_and_removed(desk: Desk) -> None:
    first, second = await desk.register("v1"), await desk.register("v2")
    assert (await move(desk, stable=(None, first)))[0] == 200
    assert (await move(desk, stable=(first, second)))[0] == 200
    routing = [one for one in desk.rig.sent(Routing) if one.model == OPPONENT][-1]
    assert routing.names == {"stable": second}
    assert [one.version for one in routing.serve] == [second], "what an alias names is held ready"
    assert (await desk.get(f"models/{OPPONENT}")).json()["aliases"] == {"stable": second}
    assert (await move(desk, stable=(second, None)))[0] == 200
    assert await aliases(desk) == {}


async def test_a_loser_is_told_what_is_there_now(desk: Desk) -> None:
    versions = [await desk.register(f"v{n}") for n in range(3)]
    await move(desk, stable=(None, versions[0]))
    await move(desk, stable=(versions[0], versions[1]))
    status, text = await move(desk, stable=(versions[0], versions[2]))
    assert status == 409
    assert "alias_moved" in text
    assert f"alias stable of {OPPONENT} names {versions[1]} now, not {versions[0]}" in text
    assert await aliases(desk) == {"stable": versions[1]}


async def test_a_request_that_is_made_again_is_done_already(desk: Desk) -> None:
    """The answer got lost, and the client asks once more."""
    first = await desk.register("v1")
    assert (await move(desk, stable=(None, first)))[0] == 200
    assert (await move(desk, stable=(None, first)))[0] == 200


async def test_of_many_at_once_one_wins(desk: Desk) -> None:
    versions = [await desk.register(f"v{n}") for n in range(9)]
    await move(desk, stable=(None, versions[0]))
    answers = await asyncio.gather(*(move(desk, stable=(versions[0], one)) for one in versions[1:]))
    winners = [one for one, (status, _) in zip(versions[1:], answers, strict=True) if status == 200]
    assert [status for status, _ in answers].count(409) == 7
    assert await aliases(desk) == {"stable": winners[0]}


async def test_several_move_together_or_not_at_all(desk: Desk) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    versions = [await desk.register(f"v{n}") for n in range(4)]
    book: dict[str, str] = {}
    for _ in range(40):
        chosen = chance.sample(["blue", "green", "red"], chance.randint(1, 3))
        wanted = {alias: chance.choice(versions) for alias in chosen}
        believed = {a: book.get(a) if chance.random() < 0.8 else chance.choice(versions) for a in chosen}
        status, _ = await move(desk, **{alias: (believed[alias], wanted[alias]) for alias in chosen})
        right = all(book.get(alias) in (believed[alias], wanted[alias]) for alias in chosen)
        assert (status == 200) == right
        book |= wanted if right else {}
        assert await aliases(desk) == book


@pytest.mark.parametrize("alias", ["champion", "canary", "previous", "candidate", "anchor"])
async def test_roles_are_moved_by_decisions_alone(desk: Desk, alias: str) -> None:
    version = await desk.register("v1")
    assert (await move(desk, **{alias: (None, version)}))[0] == 409


async def test_a_label_is_no_alias(desk: Desk) -> None:
    version = await desk.register("v1", label="v1.0")
    status, text = await move(desk, **{"v1.0": (None, version)})
    assert (status, "label_taken" in text) == (409, True)


async def test_nothing_is_named_that_cannot_serve(desk: Desk) -> None:
    assert (await move(desk, stable=(None, f"{OPPONENT}@0123456789abcdef")))[0] == 404
    version = await desk.register("v1")
    assert (await desk.post(f"models/{OPPONENT}/withdraw", version=version)).status_code == 200
    status, text = await move(desk, stable=(None, version))
    assert (status, "withdrawn" in text) == (409, True)


async def test_a_former_leader_moves_nothing(desk: Desk) -> None:
    first, second = await desk.register("v1"), await desk.register("v2")
    await move(desk, stable=(None, first))
    async with desk.rig.database.transaction() as tx:
        await tx.execute(update(LEASE).values(holder="elsewhere:1:x"))
    desk.rig.lease.held.set()  # it has not noticed yet
    assert (await move(desk, stable=(first, second)))[0] == 503
    assert await aliases(desk) == {"stable": first}
    with pytest.raises(LostLeadership):
        async with desk.rig.database.transaction() as tx:
            await desk.rig.lease.check(tx)


async def test_a_move_whose_event_cannot_be_sent_is_sent_by_the_next_process(desk: Desk) -> None:
    """Killed between commit and publication: database and bus agree again after the start."""
    first, second = await desk.register("v1"), await desk.register("v2")
    await move(desk, blue=(None, first), green=(None, first))
    desk.rig.bus.away = True
    status, text = await move(desk, blue=(first, second), green=(first, second))
    assert (status, "unavailable" in text) == (503, True)
    desk.rig.bus.away = False
    desk.rig.boot()
    await desk.rig.lease.acquire()
    await desk.rig.processor.recover()
    assert await aliases(desk) == {"blue": second, "green": second}
    assert [one for one in desk.rig.sent(Routing) if one.model == OPPONENT][-1].names == await aliases(desk)


async def test_a_change_that_fails_leaves_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transaction ends between two moves, or before the log is written."""
    first, second = await desk.register("v1"), await desk.register("v2")
    await move(desk, blue=(None, first), green=(None, first))

    async def torn(*_: object) -> None:
        raise Unavailable("the database went away")

    monkeypatch.setattr(audit, "write", torn)
    assert (await move(desk, blue=(first, second), green=(first, second)))[0] == 503
    assert await aliases(desk) == {"blue": first, "green": first}


async def test_the_log_says_who_moved_what_and_why(desk: Desk) -> None:
    first = await desk.register("v1", label="v1.0")
    await move(desk, stable=(None, first))
    assert refusal(await desk.post(f"models/{OPPONENT}/rollback")) == (409, "no_previous")
    log = AuditList.model_validate_json((await desk.get(f"audit?model={OPPONENT}")).content).data
    assert [(one.action, one.who, one.principal, one.why) for one in log] == [
        ("aliases", "ada", "open", "because"),
        ("register", "ada", "open", "a test"),
    ], "what was refused was not done"
    assert log[0].detail == f'{{"stable": [null, "{first}"]}}'
    older = await desk.get(f"audit?model={OPPONENT}&before={log[0].number}&limit=1")
    assert [one["action"] for one in older.json()["data"]] == ["register"]


async def test_the_log_knows_whether_the_key_was_proved(desk: Desk) -> None:
    locked = Desk(desk.rig, key="k" * 16)
    await locked.register("v1")
    log = AuditList.model_validate_json((await locked.get("audit")).content).data
    assert log[0].principal == "internal"
    locked.http.headers["authorization"] = "Bearer wrong"
    assert refusal(await locked.get("audit")) == (401, "invalid_api_key")
