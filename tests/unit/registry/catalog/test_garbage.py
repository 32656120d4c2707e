"""Tests of garbage collection: the files that it removes and keeps, and recovery after a crash during it."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from headrace_registry import app
from headrace_registry.garbage import collector, plan
from headrace_registry.storage.records import VersionRecord
from headrace_runtime.errors import Refused, Unavailable
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.isolation import ItemIsolation
from headrace_runtime.storage.records import Records
from headrace_runtime.storage.versions import read_manifest
from headrace_schemas.http.catalog import GarbageReport
from headrace_schemas.values.blobs import BlobRef, File, Manifest
from tests.unit.registry.conftest import OPPONENT, CatalogBench, refusal
from tests.unit.registry.rig import MODEL


async def collect(bench: CatalogBench, *, really: bool = True) -> GarbageReport:
    answer = await bench.post("garbage", dry_run=not really, why="tidy")
    assert answer.status_code == 200, answer.text
    return GarbageReport.model_validate_json(answer.content)


async def retired(bench: CatalogBench, content: str, **how: object) -> str:
    version = await bench.register(content, **how)  # type: ignore[arg-type]
    name = version.partition("@")[0]
    assert (await bench.post(f"models/{name}/retire", version=version)).status_code == 200
    return version


def file_exists(bench: CatalogBench, content: str) -> bool:
    return bench.rig.blobs.holds(bench.rig.blobs.ref(content.encode()))


def save_lineage(blobs: BlobStore, name: str, *versions: str) -> None:
    """Store a trainer's state, as `headrace_trainer.lineage.saved` writes it, that continues from the last of
    `versions`."""
    from headrace_trainer.lineage.saved import Pointer
    from tests.unit.registry.conftest import saved

    state = saved(name, *versions)
    area = blobs.area(f"lineages/{name}/0000000001")
    ref = area.put(state.model_dump_json().encode())
    pointer = Pointer(epoch=1, owner="somebody", state=ref, epochs={ref.sha256: 1})
    assert Records(blobs, f"lineages/{name}").append(0, pointer.model_dump_json().encode())


async def test_garbage_dry_run_removes_nothing(bench: CatalogBench) -> None:
    version = await retired(bench, "v1")
    report = await collect(bench, really=False)
    assert [
        (collected_version.version, collected_version.files, collected_version.size_bytes)
        for collected_version in report.collected
    ] == [(version, 1, 2)]
    assert file_exists(bench, "v1")
    assert (await bench.get("audit")).json()["data"][0]["action"] == "retire", "nothing was done"


async def test_garbage_removes_unneeded_files_but_keeps_the_manifest(bench: CatalogBench) -> None:
    version = await retired(bench, "v1")
    report = await collect(bench)
    assert [collected_version.version for collected_version in report.collected] == [version]
    assert not file_exists(bench, "v1")
    version_state = (await bench.get(f"versions/{version}")).json()["data"][0]
    assert version_state["collected"] is True
    assert read_manifest(bench.rig.blobs, BlobRef.model_validate(version_state["manifest"])).version == version
    entry = (await bench.get("audit")).json()["data"][0]
    assert (entry["action"], entry["version"], entry["why"], entry["who"]) == ("collect", version, "tidy", "ada")


async def test_garbage_keeps_shared_files_until_both_versions_are_removed(bench: CatalogBench) -> None:
    shared = File(path="tokenizer.json", blob=bench.rig.blobs.put(b"tokens"))
    first = await retired(bench, "v1", files=(shared,))
    second = await bench.register("v2", files=(shared,))
    await collect(bench)
    assert (file_exists(bench, "v1"), file_exists(bench, "tokens"), file_exists(bench, "v2")) == (False, True, True)
    await bench.post(f"models/{OPPONENT}/retire", version=second)
    await collect(bench)
    assert (file_exists(bench, "tokens"), file_exists(bench, "v2")) == (False, False)
    assert first != second


async def test_garbage_keeps_the_manifest_of_a_version_that_another_one_lists_as_its_file(bench: CatalogBench) -> None:
    served, manifest = bench.folder("v1")
    await bench.register("v1", serve=True)
    hostile = await retired(bench, "v2", files=(File(path="config.json", blob=manifest),))
    report = await collect(bench)
    assert [collected_version.version for collected_version in report.collected] == [hostile]
    assert read_manifest(bench.rig.blobs, manifest).version == served


async def test_garbage_keeps_recently_retired_versions(bench: CatalogBench) -> None:
    await retired(bench, "v1")
    patient = CatalogBench(bench.rig, retired_for_s=60)
    assert (await collect(patient)).collected == ()
    bench.rig.clock.elapsed_s += 61
    assert len((await collect(patient)).collected) == 1


async def test_garbage_ignores_versions_that_are_not_retired(bench: CatalogBench) -> None:
    await bench.rig.promote_in_turn(0, 1, 2)
    for n in range(3):
        await bench.register(f"v{n}")
    before = set(bench.rig.blobs.digests())
    assert (await collect(bench)).collected == ()
    assert set(bench.rig.blobs.digests()) == before


async def test_garbage_keeps_versions_that_a_lineage_needs(bench: CatalogBench) -> None:
    names = [await retired(bench, f"v{n}", name=MODEL) for n in range(5)]
    save_lineage(bench.rig.blobs, "main", names[0], names[2], names[4])
    report = await collect(bench)
    assert {collected_version.version for collected_version in report.collected} == {names[1], names[3]}
    assert {kept_version.version: kept_version.needed_by for kept_version in report.kept}.keys() == {
        names[0],
        names[2],
        names[4],
    }
    assert "lineage main" in report.kept[0].needed_by[0]


async def test_garbage_keeps_the_base_of_a_needed_adapter(bench: CatalogBench) -> None:
    base = await bench.register("base", name=MODEL)
    adapter = await bench.register("adapter", name=MODEL, base=base)
    for version in (adapter, base):
        assert (await bench.post(f"models/{MODEL}/retire", version=version)).status_code == 200
    save_lineage(bench.rig.blobs, "main", adapter)
    report = await collect(bench)
    assert {kept_version.version for kept_version in report.kept} == {base, adapter}


@pytest.mark.parametrize("damage", ["no json", "other fields", "flipped", "gone"])
async def test_garbage_is_refused_when_a_lineage_cannot_be_read(bench: CatalogBench, damage: str) -> None:
    version = await retired(bench, "v1")
    blobs = bench.rig.blobs
    if damage in ("flipped", "gone"):
        save_lineage(blobs, "main", version)
        area = blobs.area("lineages/main/0000000001")
        (digest,) = area.digests()
        ref = BlobRef(uri="none", sha256=digest, size=0)
        area.delete(ref)
        if damage == "flipped":
            area._write(area._path(digest), b"{}")
    else:
        data = b"{" if damage == "no json" else b'{"format": 9, "where": "elsewhere"}'
        blobs.area("lineages/main/0000000001").put(b"x")
        assert Records(blobs, "lineages/main").append(0, data)
    answer = await bench.post("garbage", dry_run=False)
    assert refusal(answer) == (409, "lineage_unreadable")
    assert "lineage main" in answer.text
    assert file_exists(bench, "v1")


async def test_garbage_interrupted_between_files_is_finished_by_the_next_run(
    bench: CatalogBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = tuple(File(path=f"{n}.safetensors", blob=bench.rig.blobs.put(b"part %d" % n)) for n in range(4))
    await retired(bench, "v1", files=more)
    removed: list[str] = []
    delete = BlobStore.delete

    def dies(store: BlobStore, ref: BlobRef) -> None:
        if len(removed) == 2:
            raise Unavailable("killed")
        removed.append(ref.sha256)
        delete(store, ref)

    monkeypatch.setattr(BlobStore, "delete", dies)
    assert (await bench.post("garbage", dry_run=False)).status_code == 503
    monkeypatch.setattr(BlobStore, "delete", delete)
    assert len(removed) == 2
    bench.rig.boot()
    await bench.rig.lease.acquire()
    await collect(CatalogBench(bench.rig))
    assert not any(file_exists(bench, f"part {n}") for n in range(4))


async def test_garbage_collected_files_return_when_registered_again(bench: CatalogBench) -> None:
    version = await retired(bench, "v1")
    await collect(bench)
    _, ref = bench.folder("v1")  # the importer stores them again
    answer = await bench.post(f"models/{OPPONENT}/register", manifest=ref.model_dump(), serve=True)
    assert answer.status_code == 201
    assert (await collect(bench)).collected == ()
    assert file_exists(bench, "v1")
    assert (await bench.get(f"versions/{version}")).json()["data"][0]["collected"] is False


async def test_garbage_keeps_needed_versions_in_random_histories(bench: CatalogBench) -> None:
    """Versions are registered, served, aliased, retired and collected at random; each remaining version stays
    complete."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    parts = [File(path=f"p{n}.json", blob=bench.rig.blobs.put(b"shared %d" % n)) for n in range(4)]
    versions: list[str] = []
    for step in range(60):
        act = chance.choice(["register", "serve", "unserve", "alias", "retire", "retire", "collect"])
        version = chance.choice(versions) if versions else ""
        if act == "register" or not versions:
            files = tuple(
                part.model_copy(update={"blob": bench.rig.blobs.put(b"shared %s" % part.path[1:2].encode())})
                for part in chance.sample(parts, 2)
            )
            content = f"v{chance.randrange(12)}"
            desk_version, ref = bench.folder(content, files=tuple(sorted(files, key=lambda file: file.path)))
            answer = await bench.post(f"models/{OPPONENT}/register", manifest=ref.model_dump())
            assert answer.status_code == 201, (step, answer.text)
            versions.append(desk_version)
        elif act == "alias":
            moves = {f"a{chance.randrange(3)}": {"version": version, "expected": None}}
            await bench.post(f"models/{OPPONENT}/aliases", moves=moves)
        elif act == "collect":
            await collect(bench)
        else:
            await bench.post(f"models/{OPPONENT}/{act}", version=version)
        await _all_files_complete(bench)


async def _all_files_complete(bench: CatalogBench) -> None:
    listed = await bench.get(f"models/{OPPONENT}/versions?limit=1000")
    for version_state in listed.json().get("data", []):
        if not version_state["collected"]:
            manifest = read_manifest(bench.rig.blobs, BlobRef.model_validate(version_state["manifest"]))
            assert all(bench.rig.blobs.holds(file.blob) for file in manifest.files), version_state["id"]


def test_lineage_reader_agrees_with_the_trainer(tmp_path: object) -> None:
    """The registry's reader finds the same versions as the trainer's own classes."""
    blobs = BlobStore(f"memory://{random.randrange(2**32)}")
    names = [f"m@{n:016x}" for n in range(4)]
    save_lineage_in_memory(blobs, names)
    assert plan.needed_versions(blobs) == {"main": {names[0], names[3]}}
    assert collector.RETIRED_MAX > 0


def save_lineage_in_memory(blobs: BlobStore, names: list[str]) -> None:
    from headrace_trainer.lineage.saved import Pointer
    from tests.unit.registry.conftest import saved

    state = saved("main", *names)
    ref = blobs.put(state.model_dump_json().encode())
    pointer = Pointer(epoch=0, owner="", state=ref, epochs={})
    blobs.set_pointer("lineages/main", pointer.model_dump_json().encode())


async def bounded(bench: CatalogBench, bytes_max: int) -> tuple[str, ...]:
    rig = bench.rig
    return await collector.GarbageCollector(rig.blobs, rig.processor, rig.lease, 3600.0, bytes_max).keep_limit()


async def test_storage_limit_removes_versions_but_keeps_rollback_targets(bench: CatalogBench) -> None:
    names = await bench.rig.promote_in_turn(0, 1, 2, 3, 4, 5)
    save_lineage(bench.rig.blobs, "main", names[0], names[5])
    assert await bounded(bench, 1 << 20) == ()
    assert await bounded(bench, 1) == (names[1], names[2])
    assert [file_exists(bench, f"weights {n}") for n in range(6)] == [True, False, False, True, True, True]
    assert await bounded(bench, 1) == (), "the rest is needed"
    await collect(bench)
    entries = (await bench.get("audit")).json()["data"]
    assert [(entry["action"], entry["version"]) for entry in entries] == [("collect", name) for name in names[2:0:-1]]
    assert "registry.versions_bytes_max" in entries[0]["why"]


async def test_storage_limit_counts_only_files_that_the_store_has(
    bench: CatalogBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint on the bus may name a manifest with any sizes."""
    await bench.rig.promote_in_turn(0, 1, 2, 3, 4, 5)
    manifests_of = collector.GarbageCollector._manifests

    def claiming(self: collector.GarbageCollector, versions: Sequence[VersionRecord]) -> list[Manifest]:
        manifests = manifests_of(self, versions)
        files = [
            file.model_copy(update={"blob": file.blob.model_copy(update={"size": 1 << 50})})
            for file in manifests[0].files
        ]
        return [manifests[0].model_copy(update={"files": tuple(files)}), *manifests[1:]]

    monkeypatch.setattr(collector.GarbageCollector, "_manifests", claiming)
    assert await bounded(bench, 1 << 20) == ()


async def test_an_error_in_the_storage_limit_does_not_end_the_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds: list[int] = []

    class Failing:
        async def keep_limit(self) -> None:
            rounds.append(len(rounds))
            if len(rounds) == 5:
                raise asyncio.CancelledError
            raise AssertionError("a state that nobody expected")

    monkeypatch.setattr(app, "_STORAGE_LIMIT_INTERVAL_S", 0.0)
    registry = _registry_with(Failing())
    with pytest.raises(asyncio.CancelledError):
        await registry._keep_storage_limit()


def _registry_with(garbage: object) -> app._Registry:
    registry = object.__new__(app._Registry)
    registry._isolated, registry._storage_changed = ItemIsolation("registry"), asyncio.Event()
    registry._garbage = garbage  # type: ignore[assignment]
    registry._model_controller = SimpleNamespace(wake=asyncio.Event())  # type: ignore[assignment]
    return registry


async def test_storage_limit_is_checked_when_a_version_is_registered() -> None:
    """However fast a trainer is, the files that are not needed are removed before its next version."""
    checked = asyncio.Event()

    class Garbage:
        async def keep_limit(self) -> None:
            checked.set()

    registry = _registry_with(Garbage())
    loop = asyncio.create_task(registry._keep_storage_limit())
    registry._registered()
    await asyncio.wait_for(checked.wait(), 2.0)
    assert registry._model_controller.wake.is_set()
    loop.cancel()


async def test_storage_limit_removes_nothing_when_a_lineage_cannot_be_read(bench: CatalogBench) -> None:
    names = await bench.rig.promote_in_turn(0, 1, 2, 3, 4)
    bench.rig.blobs.area("lineages/main/0000000001").put(b"x")
    assert Records(bench.rig.blobs, "lineages/main").append(0, b"{")
    with pytest.raises(Refused, match="lineage main cannot be read"):
        await bounded(bench, 1)
    assert all(file_exists(bench, f"weights {n}") for n in range(len(names)))


def test_storage_limit_counts_the_room_of_the_next_version() -> None:
    records = [_record(n, state) for n, state in enumerate(["promoted", "rejected", *["promoted"] * 4])]
    blobs = {record.version: {"tokenizer": 1, f"weights {record.number}": 10} for record in records}
    assert plan.versions_over_limit(records, blobs, {"m@0"}, 61 + 11) == ()
    assert plan.versions_over_limit(records, blobs, {"m@0"}, 61 + 10) == ("m@1",)
    assert plan.versions_over_limit(records, blobs, {"m@0"}, 61) == ("m@1", "m@2")


def _record(number: int, state: str, **fields: object) -> VersionRecord:
    values: dict[str, object] = {field.name: None for field in dataclasses.fields(VersionRecord)}
    at = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=number)
    values |= {"number": number, "version": f"m@{number}", "model": "m", "state": state, "changed": at, "trained": True}
    return VersionRecord(**{**values, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(200))
def test_storage_limit_holds_or_only_needed_versions_are_left(seed: int) -> None:
    chance = random.Random(seed)
    states = ["registered", "probing", "rejected", "skipped", "withdrawn", "promoted", "promoted"]
    records = [
        _record(n, chance.choice(states), trained=chance.random() < 0.9, label=chance.choice([None, None, None, "v1"]))
        for n in range(chance.randint(1, 20))
    ]
    blobs = {
        record.version: {f"shared {chance.randrange(3)}": 5, f"own {record.number}": chance.randint(1, 50)}
        for record in records
    }
    needed = {record.version for record in records if chance.random() < 0.2}
    bytes_max = chance.randint(0, 400)
    chosen = plan.versions_over_limit(records, blobs, needed, bytes_max)
    left = [record for record in records if record.version not in chosen]
    total = sum({digest: size for record in left for digest, size in blobs[record.version].items()}.values())
    champions = [record.version for record in records if record.state == "promoted"][-1 - plan.ROLLBACK_TARGETS :]
    assert not set(chosen) & {*needed, *champions}
    removed = [record for record in records if record.version in chosen]
    assert all(
        record.trained and not record.label and record.state not in ("registered", "probing") for record in removed
    )
    free = {record.version for record in left if record.trained and not record.label} - {*needed, *champions}
    free -= {record.version for record in left if record.state in ("registered", "probing")}
    newest = [record for record in records if record.trained][-1:]
    next_bytes = sum(sum(blobs[record.version].values()) for record in newest)
    assert total + next_bytes <= bytes_max or not free, f"seed {seed}"
    order = [
        (record.state == "promoted", record.number) for name in chosen for record in records if record.version == name
    ]
    assert order == sorted(order)
