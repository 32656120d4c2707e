"""Retired versions never serve again, and versions in use cannot be retired."""

from __future__ import annotations

from headrace_schemas import Routing
from headrace_schemas.http.catalog import NoteList
from headrace_schemas.http.registry_api import VersionList
from tests.unit.registry.catalog.catalog_bench import OPPONENT, CatalogBench, refusal
from tests.unit.registry.rig import MODEL


async def retire(bench: CatalogBench, version: str, model: str = OPPONENT) -> tuple[int, str]:
    answer = await bench.post(f"models/{model}/retire", version=version, why="old")
    return answer.status_code, answer.text


async def test_retire_refuses_a_version_in_use_with_the_reasons(bench: CatalogBench) -> None:
    first, second, third = await bench.rig.promote_in_turn(0, 1, 2)
    for version, role in {third: "the champion", second: "the previous version", first: "the anchor"}.items():
        status, text = await retire(bench, version, MODEL)
        assert (status, role in text) == (409, True)
    await bench.post(f"models/{MODEL}/pin", version=third)
    assert "pinned" in (await retire(bench, third, MODEL))[1]


async def test_retire_is_refused_for_aliases_served_versions_and_bases(bench: CatalogBench) -> None:
    version = await bench.register("v1")
    await bench.post(f"models/{OPPONENT}/aliases", moves={"stable": {"version": version, "expected": None}})
    assert "alias stable names it" in (await retire(bench, version))[1]
    await bench.post(f"models/{OPPONENT}/aliases", moves={"stable": {"version": None, "expected": version}})
    await bench.post(f"models/{OPPONENT}/serve", version=version)
    assert "an operator serves it" in (await retire(bench, version))[1]
    await bench.post(f"models/{OPPONENT}/unserve", version=version)
    adapter = await bench.register("adapter", name="formal", base=version)
    assert f"{adapter} is an adapter of it" in (await retire(bench, version))[1]
    assert (await retire(bench, adapter, "formal"))[0] == 200
    assert (await retire(bench, version))[0] == 200


async def test_retired_version_never_serves(bench: CatalogBench) -> None:
    version = await bench.register("v1", label="v1.0")
    assert (await retire(bench, version))[0] == 200
    for path in ("serve", "promote", "pin"):
        answer = await bench.post(f"models/{OPPONENT}/{path}", version=version)
        assert refusal(answer) == (409, "incompatible_version")
        assert "it is retired" in answer.text
    moves = {"stable": {"version": version, "expected": None}}
    assert refusal(await bench.post(f"models/{OPPONENT}/aliases", moves=moves)) == (409, "incompatible_version")


async def test_retired_waiting_version_never_becomes_candidate(bench: CatalogBench) -> None:
    await bench.rig.promote_in_turn(0)
    waiting = await bench.rig.checkpoint(1)
    assert (await retire(bench, waiting, MODEL))[0] == 200
    await bench.rig.ticks()
    assert waiting not in {served.version for table in bench.rig.sent(Routing) for served in table.serve}


async def test_retired_version_returns_when_registered_again(bench: CatalogBench) -> None:
    version = await bench.register("v1", label="v1.0")
    await retire(bench, version)
    assert await bench.register("v1", serve=True) == version
    version_state = VersionList.model_validate_json((await bench.get(f"models/{OPPONENT}/versions")).content).data[0]
    assert (version_state.retired, version_state.label, version_state.served) == (False, "v1.0", True)


async def test_tags_and_notes_are_stored_and_limited(bench: CatalogBench) -> None:
    version = await bench.register("v1")
    await bench.post(f"models/{OPPONENT}/tags", version=version, add=["baseline", "small"])
    await bench.post(f"models/{OPPONENT}/tags", version=version, add=["baseline"], remove=["small", "never"])
    version_state = VersionList.model_validate_json((await bench.get(f"versions/{version}")).content).data[0]
    assert version_state.tags == ("baseline",)
    await bench.post(f"models/{OPPONENT}/notes", version=version, text="plays well")
    notes = NoteList.model_validate_json((await bench.get(f"models/{OPPONENT}/notes?version={version}")).content).data
    assert [(note.text, note.who) for note in notes] == [("plays well", "ada")]
    too_many_tags = [f"t{n}" for n in range(64)]
    assert refusal(await bench.post(f"models/{OPPONENT}/tags", version=version, add=too_many_tags)) == (
        409,
        "too_many_tags",
    )
    assert refusal(await bench.get(f"models/{OPPONENT}/notes?version=nobody")) == (404, "version_not_found")
