"""Models that nobody trains: registered, served when asked for, and never a candidate by themselves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace_schemas import Routing
from headrace_schemas.manifest import File
from headrace_schemas.registry_api import VersionList
from tests.unit.registry.catalog.desk import OPPONENT, Desk, refusal
from tests.unit.registry.rig import MODEL, loaded


def routing(desk: Desk, model: str = OPPONENT) -> Routing:
    return [event for event in desk.rig.sent(Routing) if event.model == model][-1]


def follow(desk: Desk) -> None:
    """The replica holds what every routing asks for."""
    newest = {routing.model: routing for routing in desk.rig.sent(Routing)}
    desk.rig.clock.elapsed_s += 1
    desk.rig.report("r1", *(loaded(served.version) for table in newest.values() for served in table.serve))


async def test_register_leaves_a_version_waiting_until_it_is_requested(desk: Desk) -> None:
    version = await desk.register("v1", label="v1.0")
    await desk.rig.ticks()
    assert routing(desk).serve == ()
    assert routing(desk).untrained == (version,)
    version_state = VersionList.model_validate_json((await desk.get(f"models/{OPPONENT}/versions")).content).data[0]
    assert (version_state.trained, version_state.label, version_state.state, version_state.served) == (
        False,
        "v1.0",
        "registered",
        False,
    )


async def test_serve_makes_the_first_version_champion_after_its_probe(desk: Desk) -> None:
    version = await desk.register("v1", label="v1.0", serve=True)
    await desk.rig.ticks()
    assert routing(desk).champion is None, "nobody is served before its probe"
    follow(desk)
    await desk.rig.ticks()
    assert routing(desk).champion == version
    assert routing(desk).names == {"v1.0": version}
    assert desk.rig.gate.runs == [], "no gate plays what nobody trains"


async def test_serve_routes_two_versions_side_by_side(desk: Desk) -> None:
    first = await desk.register("v1", label="v1.0", serve=True)
    await desk.rig.ticks()
    follow(desk)
    await desk.rig.ticks()
    second = await desk.register("v2", label="v1.1", serve=True)
    await desk.rig.ticks()
    assert routing(desk).champion == first, "a second version takes nothing over by itself"
    assert {served.version for served in routing(desk).serve} == {first, second}
    assert routing(desk).names == {"v1.0": first, "v1.1": second}
    assert (await desk.post(f"models/{OPPONENT}/pin", version=second)).status_code == 200
    follow(desk)
    await desk.rig.ticks()
    assert (routing(desk).champion, routing(desk).pinned) == (second, second)


async def test_unserve_removes_the_version_from_the_routing(desk: Desk) -> None:
    first = await desk.register("v1", serve=True)
    await desk.rig.ticks()
    follow(desk)
    await desk.rig.ticks()
    second = await desk.register("v2", serve=True)
    assert (await desk.post(f"models/{OPPONENT}/unserve", version=second)).status_code == 200
    assert {served.version for served in routing(desk).serve} == {first}
    assert (await desk.post(f"models/{OPPONENT}/unserve", version=first)).status_code == 200
    await desk.rig.ticks()
    assert (routing(desk).champion, routing(desk).serve) == (None, ())


async def test_unserve_refuses_a_trained_champion(desk: Desk) -> None:
    (champion,) = await desk.rig.crowned(0)
    answer = await desk.post(f"models/{MODEL}/unserve", version=champion)
    assert refusal(answer) == (409, "has_a_role")
    assert champion in answer.text


async def test_registered_version_beside_a_trained_champion_needs_a_request(desk: Desk) -> None:
    """Of the trained model's own name: it waits, is served beside, and competes only when somebody asks."""
    (champion,) = await desk.rig.crowned(0)
    foreign = await desk.register("foreign", name=MODEL, serve=True)
    await desk.rig.ticks()
    assert desk.rig.routing.champion == champion
    assert foreign in {served.version for served in desk.rig.routing.serve}
    assert desk.rig.routing.untrained == (foreign,)
    async with desk.rig.running():
        assert (await desk.post(f"models/{MODEL}/promote", version=foreign)).status_code == 202
        await desk.rig.until(lambda: ("promoted", foreign) in desk.rig.decided())


async def test_serve_refuses_more_versions_than_served_max(desk: Desk) -> None:
    """And what is refused has changed nothing."""
    served = [await desk.register(f"w{n}", name=f"model-{n}", serve=True) for n in range(desk.rig.settings.served_max)]
    version, ref = desk.folder("one more", name="model-x")
    answer = await desk.post("models/model-x/register", manifest=ref.model_dump(), serve=True)
    assert refusal(answer) == (409, "no_room")
    assert served[0] in answer.text
    assert refusal(await desk.get("models/model-x")) == (404, "model_not_found")
    assert (await desk.post("models/model-0/unserve", version=served[0])).status_code == 200
    assert (await desk.post("models/model-x/register", manifest=ref.model_dump(), serve=True)).status_code == 201
    assert version in (await desk.get("models/model-x/versions")).text


async def test_register_of_the_same_files_gives_the_same_version(desk: Desk) -> None:
    first = await desk.register("v1")
    assert await desk.register("v1", label="v1.0") == first
    assert len((await desk.get(f"models/{OPPONENT}/versions")).json()["data"]) == 1


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"tokenizer": "c"}, "incompatible_version"),
        ({"template": "c"}, "incompatible_version"),
        ({"base": "opponent@0123456789abcdef"}, "incompatible_version"),
    ],
)
async def test_register_refuses_incompatible_versions_with_the_reason(
    desk: Desk, change: dict[str, str], code: str
) -> None:
    await desk.register("v1", serve=True)
    await desk.rig.ticks()
    follow(desk)
    await desk.rig.ticks()
    version, ref = desk.folder("v2", **change)  # type: ignore[arg-type]
    answer = await desk.post(f"models/{OPPONENT}/register", manifest=ref.model_dump())
    assert refusal(answer) == (409, code)
    assert version in answer.text
    assert version not in (await desk.get(f"models/{OPPONENT}/versions")).text, "refused is as if it had never been"


async def test_register_refuses_an_adapter_with_another_tokenizer_than_its_base(desk: Desk) -> None:
    base = await desk.register("v1", serve=True)
    good = await desk.register("adapter", base=base, name="formal")
    assert good.startswith("formal@")
    _, ref = desk.folder("adapter 2", base=base, name="formal", tokenizer="c")
    answer = await desk.post("models/formal/register", manifest=ref.model_dump())
    assert refusal(answer) == (409, "incompatible_version")
    assert base in answer.text
    _, ref = desk.folder("adapter 3", base=good, name="formal")
    assert refusal(await desk.post("models/formal/register", manifest=ref.model_dump())) == (
        409,
        "incompatible_version",
    )
    assert (await desk.post("models/formal/serve", version=good)).status_code == 200
    assert [served.version for served in routing(desk, "formal").serve] == [base, good], "its base before it"


async def test_register_never_moves_a_label(desk: Desk) -> None:
    first = await desk.register("v1", label="v1.0")
    _, ref = desk.folder("v2")
    answer = await desk.post(f"models/{OPPONENT}/register", manifest=ref.model_dump(), label="v1.0")
    assert refusal(answer) == (409, "label_taken")
    assert first in answer.text
    for role in ("champion", "canary", "previous"):
        answer = await desk.post(f"models/{OPPONENT}/register", manifest=ref.model_dump(), label=role)
        assert refusal(answer) == (409, "role")
    _, again = desk.folder("v1")
    answer = await desk.post(f"models/{OPPONENT}/register", manifest=again.model_dump(), label="v2.0")
    assert refusal(answer) == (409, "labelled")


async def test_register_names_files_missing_in_the_store(desk: Desk) -> None:
    _, ref = desk.folder("v1")
    desk.rig.blobs.delete(desk.rig.blobs.ref(b"v1"))
    answer = await desk.post(f"models/{OPPONENT}/register", manifest=ref.model_dump())
    assert refusal(answer) == (409, "files_missing")
    assert "model.safetensors" in answer.text


async def test_register_refuses_a_manifest_of_another_model(desk: Desk) -> None:
    _, ref = desk.folder("v1")
    assert refusal(await desk.post("models/judge/register", manifest=ref.model_dump())) == (400, "other_model")


async def test_register_is_refused_by_a_standby(desk: Desk) -> None:
    _, ref = desk.folder("v1")
    await desk.rig.lease.release()
    answer = await desk.post(f"models/{OPPONENT}/register", manifest=ref.model_dump())
    assert refusal(answer) == (503, "not_leader")


async def test_register_refuses_files_with_flipped_bytes(desk: Desk) -> None:
    """120 of them, in the manifest and in every file."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    files = tuple(File(path=f"{n}.json", blob=desk.rig.blobs.put(b"file %d" % n)) for n in range(4))
    version, ref = desk.folder("weights", files=files)
    blobs = [ref, *(file.blob for file in files), desk.rig.blobs.ref(b"weights")]
    for number in range(120):
        blob = blobs[number % len(blobs)]
        with damaged(Path(desk.rig.blobs._path(blob.sha256)), chance):
            answer = await desk.post(f"models/{OPPONENT}/register", manifest=ref.model_dump(), serve=True)
        assert refusal(answer) == (400, "unusable_manifest")
        assert blob.sha256 in answer.text
    assert refusal(await desk.get(f"models/{OPPONENT}")) == (404, "model_not_found")
    assert desk.rig.sent(Routing) == []
    assert (await desk.post(f"models/{OPPONENT}/register", manifest=ref.model_dump())).status_code == 201
    assert version in (await desk.get(f"models/{OPPONENT}/versions")).text


@contextmanager
def damaged(path: Path, chance: random.Random) -> Iterator[None]:
    """One bit of a file is another one inside."""
    content = path.read_bytes()
    position = chance.randrange(len(content))
    path.write_bytes(
        content[:position] + bytes([content[position] ^ (1 << chance.randrange(8))]) + content[position + 1 :]
    )
    yield
    path.write_bytes(content)
