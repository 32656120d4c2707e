"""Tests of registered and of retired versions.

A registered version is served on request, and never becomes a candidate by itself. A retired version never serves
again, and a version in use cannot be retired.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace_schemas import Routing
from headrace_schemas.http.catalog import NoteList
from headrace_schemas.http.registry_api import VersionList, VersionState
from headrace_schemas.values.blobs import File
from tests.unit.registry.catalog.test_garbage import collect, file_exists, retired
from tests.unit.registry.conftest import OPPONENT, CatalogBench, refusal
from tests.unit.registry.rig import MODEL, loaded


def routing(bench: CatalogBench, model: str = OPPONENT) -> Routing:
    return [event for event in bench.rig.sent(Routing) if event.model == model][-1]


def follow(bench: CatalogBench) -> None:
    """Let the replica load the versions of all routings."""
    newest = {routing.model: routing for routing in bench.rig.sent(Routing)}
    bench.rig.clock.elapsed_s += 1
    bench.rig.report("r1", *(loaded(served.version) for table in newest.values() for served in table.serve))


async def test_register_leaves_a_version_waiting_until_it_is_requested(bench: CatalogBench) -> None:
    version = await bench.register("v1", label="v1.0")
    await bench.rig.ticks()
    assert routing(bench).serve == ()
    assert routing(bench).untrained == (version,)
    version_state = VersionList.model_validate_json((await bench.get(f"models/{OPPONENT}/versions")).content).data[0]
    assert (version_state.trained, version_state.label, version_state.state, version_state.served) == (
        False,
        "v1.0",
        "registered",
        False,
    )


async def test_serve_makes_the_first_version_champion_after_its_probe(bench: CatalogBench) -> None:
    version = await bench.register("v1", label="v1.0", serve=True)
    await bench.rig.ticks()
    assert routing(bench).champion is None, "nobody is served before its probe"
    follow(bench)
    await bench.rig.ticks()
    assert routing(bench).champion == version
    assert routing(bench).names == {"v1.0": version}
    assert bench.rig.gate.runs == [], "no gate plays what nobody trains"


async def test_serve_routes_two_versions_side_by_side(bench: CatalogBench) -> None:
    first = await bench.register("v1", label="v1.0", serve=True)
    await bench.rig.ticks()
    follow(bench)
    await bench.rig.ticks()
    second = await bench.register("v2", label="v1.1", serve=True)
    await bench.rig.ticks()
    assert routing(bench).champion == first, "a second version takes nothing over by itself"
    assert {served.version for served in routing(bench).serve} == {first, second}
    assert routing(bench).names == {"v1.0": first, "v1.1": second}
    assert (await bench.post(f"models/{OPPONENT}/pin", version=second)).status_code == 200
    follow(bench)
    await bench.rig.ticks()
    assert (routing(bench).champion, routing(bench).pinned) == (second, second)


async def test_unserve_removes_the_version_from_the_routing(bench: CatalogBench) -> None:
    first = await bench.register("v1", serve=True)
    await bench.rig.ticks()
    follow(bench)
    await bench.rig.ticks()
    second = await bench.register("v2", serve=True)
    assert (await bench.post(f"models/{OPPONENT}/unserve", version=second)).status_code == 200
    assert {served.version for served in routing(bench).serve} == {first}
    assert (await bench.post(f"models/{OPPONENT}/unserve", version=first)).status_code == 200
    await bench.rig.ticks()
    assert (routing(bench).champion, routing(bench).serve) == (None, ())


async def test_unserve_refuses_a_trained_champion(bench: CatalogBench) -> None:
    (champion,) = await bench.rig.promote_in_turn(0)
    answer = await bench.post(f"models/{MODEL}/unserve", version=champion)
    assert refusal(answer) == (409, "has_a_role")
    assert champion in answer.text


async def test_registered_version_beside_a_trained_champion_needs_a_request(bench: CatalogBench) -> None:
    """A registered version of a trained model is only served, or made a candidate, on request."""
    (champion,) = await bench.rig.promote_in_turn(0)
    foreign = await bench.register("foreign", name=MODEL, serve=True)
    await bench.rig.ticks()
    assert bench.rig.routing.champion == champion
    assert foreign in {served.version for served in bench.rig.routing.serve}
    assert bench.rig.routing.untrained == (foreign,)
    async with bench.rig.running():
        assert (await bench.post(f"models/{MODEL}/promote", version=foreign)).status_code == 202
        await bench.rig.until(lambda: ("promoted", foreign) in bench.rig.decided())


async def test_serve_refuses_more_versions_than_served_max(bench: CatalogBench) -> None:
    """A refused request changes no state."""
    served = [
        await bench.register(f"w{n}", name=f"model-{n}", serve=True) for n in range(bench.rig.settings.served_max)
    ]
    version, ref = bench.folder("one more", name="model-x")
    answer = await bench.post("models/model-x/register", manifest=ref.model_dump(), serve=True)
    assert refusal(answer) == (409, "no_room")
    assert served[0] in answer.text
    assert refusal(await bench.get("models/model-x")) == (404, "model_not_found")
    assert (await bench.post("models/model-0/unserve", version=served[0])).status_code == 200
    assert (await bench.post("models/model-x/register", manifest=ref.model_dump(), serve=True)).status_code == 201
    assert version in (await bench.get("models/model-x/versions")).text


async def test_register_of_the_same_files_gives_the_same_version(bench: CatalogBench) -> None:
    first = await bench.register("v1")
    assert await bench.register("v1", label="v1.0") == first
    assert len((await bench.get(f"models/{OPPONENT}/versions")).json()["data"]) == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tokenizer": "c"}, "incompatible_version"),
        ({"template": "c"}, "incompatible_version"),
        ({"base": "opponent@0123456789abcdef"}, "incompatible_version"),
    ],
)
async def test_register_refuses_incompatible_versions_with_the_reason(
    bench: CatalogBench, change: dict[str, str], code: str
) -> None:
    await bench.register("v1", serve=True)
    await bench.rig.ticks()
    follow(bench)
    await bench.rig.ticks()
    version, ref = bench.folder("v2", **change)  # type: ignore[arg-type]
    answer = await bench.post(f"models/{OPPONENT}/register", manifest=ref.model_dump())
    assert refusal(answer) == (409, code)
    assert version in answer.text
    assert version not in (await bench.get(f"models/{OPPONENT}/versions")).text, "refused is as if it had never been"


async def test_register_refuses_an_adapter_with_another_tokenizer_than_its_base(bench: CatalogBench) -> None:
    base = await bench.register("v1", serve=True)
    good = await bench.register("adapter", base=base, name="formal")
    assert good.startswith("formal@")
    _, ref = bench.folder("adapter 2", base=base, name="formal", tokenizer="c")
    answer = await bench.post("models/formal/register", manifest=ref.model_dump())
    assert refusal(answer) == (409, "incompatible_version")
    assert base in answer.text
    _, ref = bench.folder("adapter 3", base=good, name="formal")
    assert refusal(await bench.post("models/formal/register", manifest=ref.model_dump())) == (
        409,
        "incompatible_version",
    )
    assert (await bench.post("models/formal/serve", version=good)).status_code == 200
    assert [served.version for served in routing(bench, "formal").serve] == [base, good], "its base before it"


async def test_register_never_moves_a_label(bench: CatalogBench) -> None:
    first = await bench.register("v1", label="v1.0")
    _, ref = bench.folder("v2")
    answer = await bench.post(f"models/{OPPONENT}/register", manifest=ref.model_dump(), label="v1.0")
    assert refusal(answer) == (409, "label_taken")
    assert first in answer.text
    for role in ("champion", "canary", "previous"):
        answer = await bench.post(f"models/{OPPONENT}/register", manifest=ref.model_dump(), label=role)
        assert refusal(answer) == (409, "role")
    _, again = bench.folder("v1")
    answer = await bench.post(f"models/{OPPONENT}/register", manifest=again.model_dump(), label="v2.0")
    assert refusal(answer) == (409, "labelled")


async def test_register_names_files_missing_in_the_store(bench: CatalogBench) -> None:
    _, ref = bench.folder("v1")
    bench.rig.blobs.delete(bench.rig.blobs.ref(b"v1"))
    answer = await bench.post(f"models/{OPPONENT}/register", manifest=ref.model_dump())
    assert refusal(answer) == (409, "files_missing")
    assert "model.safetensors" in answer.text


async def test_register_refuses_a_manifest_of_another_model(bench: CatalogBench) -> None:
    _, ref = bench.folder("v1")
    assert refusal(await bench.post("models/judge/register", manifest=ref.model_dump())) == (400, "other_model")


async def test_register_is_refused_by_a_standby(bench: CatalogBench) -> None:
    _, ref = bench.folder("v1")
    await bench.rig.lease.release()
    answer = await bench.post(f"models/{OPPONENT}/register", manifest=ref.model_dump())
    assert refusal(answer) == (503, "not_leader")


async def test_register_refuses_files_with_flipped_bytes(bench: CatalogBench) -> None:
    """Flip 120 bytes, spread over the manifest and all files."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    files = tuple(File(path=f"{n}.json", blob=bench.rig.blobs.put(b"file %d" % n)) for n in range(4))
    version, ref = bench.folder("weights", files=files)
    blobs = [ref, *(file.blob for file in files), bench.rig.blobs.ref(b"weights")]
    for number in range(120):
        blob = blobs[number % len(blobs)]
        with damage_one_byte(Path(bench.rig.blobs._path(blob.sha256)), chance):
            answer = await bench.post(f"models/{OPPONENT}/register", manifest=ref.model_dump(), serve=True)
        assert refusal(answer) == (400, "unusable_manifest")
        assert blob.sha256 in answer.text
    assert refusal(await bench.get(f"models/{OPPONENT}")) == (404, "model_not_found")
    assert bench.rig.sent(Routing) == []
    assert (await bench.post(f"models/{OPPONENT}/register", manifest=ref.model_dump())).status_code == 201
    assert version in (await bench.get(f"models/{OPPONENT}/versions")).text


@contextmanager
def damage_one_byte(path: Path, chance: random.Random) -> Iterator[None]:
    """Flip one bit of a file inside the context."""
    content = path.read_bytes()
    position = chance.randrange(len(content))
    path.write_bytes(
        content[:position] + bytes([content[position] ^ (1 << chance.randrange(8))]) + content[position + 1 :]
    )
    yield
    path.write_bytes(content)


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


def damage_manifest(bench: CatalogBench, version: VersionState, damage: str) -> None:
    blobs, ref = bench.rig.blobs, version.manifest
    assert ref is not None
    blobs.delete(ref)
    if damage != "gone":
        blobs._write(blobs._path(ref.sha256), b"{}" if damage == "flipped" else b"")


@pytest.mark.parametrize("damage", ["flipped", "empty", "gone"])
@pytest.mark.parametrize("is_retired", [False, True])
async def test_garbage_collects_other_versions_while_a_manifest_cannot_be_read(
    bench: CatalogBench, damage: str, is_retired: bool
) -> None:
    shared = File(path="shared.json", blob=bench.rig.blobs.put(b"shared"))
    damaged = await (retired(bench, "v1", files=(shared,)) if is_retired else bench.register("v1", files=(shared,)))
    other = await retired(bench, "v2", files=(shared,))
    answer = (await bench.get(f"versions/{damaged}")).json()["data"][0]
    damage_manifest(bench, VersionState.model_validate(answer), damage)
    report = await collect(bench)
    assert [collected_version.version for collected_version in report.collected] == [other]
    assert not file_exists(bench, "v2")
    assert file_exists(bench, "v1")
    assert file_exists(bench, "shared"), "the version whose manifest cannot be read has it, too"
    (kept,) = (kept_version for kept_version in report.kept if kept_version.version == damaged)
    assert "its manifest cannot be read" in kept.needed_by[0]
    bench.rig.boot()  # a registry that has never read the manifest knows the files from the database
    await bench.rig.lease.acquire()
    again = CatalogBench(bench.rig)
    assert (await collect(again)).collected == (await collect(again)).collected
    assert file_exists(again, "v1")
    trouble = [model["trouble"] for model in (await again.get("models")).json()["data"]]
    assert any(damaged in (text or "") for text in trouble)
