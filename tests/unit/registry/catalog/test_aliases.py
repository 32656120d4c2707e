"""Tests that aliases move by compare-and-swap: a request makes all of its moves or none, also under concurrent
requests."""

from __future__ import annotations

import asyncio
import random

import pytest
from sqlalchemy import update

from headrace_registry.storage import audit, store
from headrace_registry.storage.leader import LostLeadership
from headrace_registry.storage.tables import LEASE
from headrace_runtime.errors import Unavailable
from headrace_schemas import Routing
from headrace_schemas.http.catalog import AuditList
from tests.unit.registry.conftest import OPPONENT, CatalogBench, refusal


async def move(bench: CatalogBench, **moves: tuple[str | None, str | None]) -> tuple[int, str]:
    """Move each alias from its expected version to a new one, and return the status and the text of the response."""
    body = {alias: {"expected": expected, "version": version} for alias, (expected, version) in moves.items()}
    answer = await bench.post(f"models/{OPPONENT}/aliases", moves=body, why="because")
    return answer.status_code, answer.text


async def aliases(bench: CatalogBench) -> dict[str, str]:
    async with bench.rig.database.transaction() as tx:
        return await store.aliases(tx, OPPONENT)


async def test_aliases_can_be_set_moved_and_removed(bench: CatalogBench) -> None:
    first, second = await bench.register("v1"), await bench.register("v2")
    assert (await move(bench, stable=(None, first)))[0] == 200
    assert (await move(bench, stable=(first, second)))[0] == 200
    routing = [event for event in bench.rig.sent(Routing) if event.model == OPPONENT][-1]
    assert routing.names == {"stable": second}
    assert [served.version for served in routing.serve] == [second], "what an alias names is held ready"
    assert (await bench.get(f"models/{OPPONENT}")).json()["aliases"] == {"stable": second}
    assert (await move(bench, stable=(second, None)))[0] == 200
    assert await aliases(bench) == {}


async def test_move_with_a_stale_expectation_is_refused_with_the_present_version(bench: CatalogBench) -> None:
    versions = [await bench.register(f"v{n}") for n in range(3)]
    await move(bench, stable=(None, versions[0]))
    await move(bench, stable=(versions[0], versions[1]))
    status, text = await move(bench, stable=(versions[0], versions[2]))
    assert status == 409
    assert "alias_moved" in text
    assert f"alias stable of {OPPONENT} names {versions[1]} now, not {versions[0]}" in text
    assert await aliases(bench) == {"stable": versions[1]}


async def test_repeated_move_succeeds_without_a_change(bench: CatalogBench) -> None:
    """A client that lost the response repeats the request."""
    first = await bench.register("v1")
    assert (await move(bench, stable=(None, first)))[0] == 200
    assert (await move(bench, stable=(None, first)))[0] == 200


async def test_concurrent_moves_have_exactly_one_winner(bench: CatalogBench) -> None:
    versions = [await bench.register(f"v{n}") for n in range(9)]
    await move(bench, stable=(None, versions[0]))
    answers = await asyncio.gather(*(move(bench, stable=(versions[0], name)) for name in versions[1:]))
    winners = [name for name, (status, _) in zip(versions[1:], answers, strict=True) if status == 200]
    assert [status for status, _ in answers].count(409) == 7
    assert await aliases(bench) == {"stable": winners[0]}


async def test_moves_of_one_request_are_atomic(bench: CatalogBench) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    versions = [await bench.register(f"v{n}") for n in range(4)]
    expected_aliases: dict[str, str] = {}
    for _ in range(40):
        chosen = chance.sample(["blue", "green", "red"], chance.randint(1, 3))
        wanted_aliases = {alias: chance.choice(versions) for alias in chosen}
        believed = {a: expected_aliases.get(a) if chance.random() < 0.8 else chance.choice(versions) for a in chosen}
        status, _ = await move(bench, **{alias: (believed[alias], wanted_aliases[alias]) for alias in chosen})
        right = all(expected_aliases.get(alias) in (believed[alias], wanted_aliases[alias]) for alias in chosen)
        assert (status == 200) == right
        expected_aliases |= wanted_aliases if right else {}
        assert await aliases(bench) == expected_aliases


@pytest.mark.parametrize("alias", ["champion", "canary", "previous", "candidate", "anchor"])
async def test_move_refuses_names_of_roles(bench: CatalogBench, alias: str) -> None:
    version = await bench.register("v1")
    assert (await move(bench, **{alias: (None, version)}))[0] == 409


async def test_move_refuses_names_of_labels(bench: CatalogBench) -> None:
    version = await bench.register("v1", label="v1.0")
    status, text = await move(bench, **{"v1.0": (None, version)})
    assert (status, "label_taken" in text) == (409, True)


async def test_move_refuses_versions_that_cannot_serve(bench: CatalogBench) -> None:
    assert (await move(bench, stable=(None, f"{OPPONENT}@0123456789abcdef")))[0] == 404
    version = await bench.register("v1")
    assert (await bench.post(f"models/{OPPONENT}/withdraw", version=version)).status_code == 200
    status, text = await move(bench, stable=(None, version))
    assert (status, "withdrawn" in text) == (409, True)


async def test_former_leader_cannot_move_aliases(bench: CatalogBench) -> None:
    first, second = await bench.register("v1"), await bench.register("v2")
    await move(bench, stable=(None, first))
    async with bench.rig.database.transaction() as tx:
        await tx.execute(update(LEASE).values(holder="elsewhere:1:x"))
    bench.rig.lease.acquired.set()  # it has not noticed yet
    assert (await move(bench, stable=(first, second)))[0] == 503
    assert await aliases(bench) == {"stable": first}
    with pytest.raises(LostLeadership):
        async with bench.rig.database.transaction() as tx:
            await bench.rig.lease.check(tx)


async def test_unpublished_move_is_published_by_the_next_process(bench: CatalogBench) -> None:
    """The process is killed between commit and publication; database and bus agree again after a restart."""
    first, second = await bench.register("v1"), await bench.register("v2")
    await move(bench, blue=(None, first), green=(None, first))
    bench.rig.bus.away = True
    status, text = await move(bench, blue=(first, second), green=(first, second))
    assert (status, "unavailable" in text) == (503, True)
    bench.rig.bus.away = False
    bench.rig.boot()
    await bench.rig.lease.acquire()
    await bench.rig.processor.recover()
    assert await aliases(bench) == {"blue": second, "green": second}
    assert [routing for routing in bench.rig.sent(Routing) if routing.model == OPPONENT][-1].names == await aliases(
        bench
    )


async def test_failed_change_stores_nothing(bench: CatalogBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The transaction fails between two moves, or before the audit log is written."""
    first, second = await bench.register("v1"), await bench.register("v2")
    await move(bench, blue=(None, first), green=(None, first))

    async def torn(*_: object) -> None:
        raise Unavailable("the database went away")

    monkeypatch.setattr(audit, "add_entry", torn)
    assert (await move(bench, blue=(first, second), green=(first, second)))[0] == 503
    assert await aliases(bench) == {"blue": first, "green": first}


async def test_audit_log_has_requester_action_and_reason(bench: CatalogBench) -> None:
    first = await bench.register("v1", label="v1.0")
    await move(bench, stable=(None, first))
    assert refusal(await bench.post(f"models/{OPPONENT}/rollback")) == (409, "no_previous")
    log = AuditList.model_validate_json((await bench.get(f"audit?model={OPPONENT}")).content).data
    assert [(entry.action, entry.who, entry.principal, entry.why) for entry in log] == [
        ("aliases", "ada", "open", "because"),
        ("register", "ada", "open", "a test"),
    ], "what was refused was not done"
    assert log[0].detail == f'{{"stable": [null, "{first}"]}}'
    older = await bench.get(f"audit?model={OPPONENT}&before={log[0].number}&limit=1")
    assert [entry["action"] for entry in older.json()["data"]] == ["register"]


async def test_audit_log_has_the_principal_of_the_key(bench: CatalogBench) -> None:
    locked = CatalogBench(bench.rig, key="k" * 16)
    await locked.register("v1")
    log = AuditList.model_validate_json((await locked.get("audit")).content).data
    assert log[0].principal == "internal"
    locked.http.headers["authorization"] = "Bearer wrong"
    assert refusal(await locked.get("audit")) == (401, "invalid_api_key")
