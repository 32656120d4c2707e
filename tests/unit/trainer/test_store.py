"""Tests of the saved state: complete or absent, reported when damaged, and without unreferenced blobs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace_runtime.errors import CorruptBlob, SettingError, Unavailable
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.records import Records
from headrace_schemas.values.blobs import BlobRef, Fingerprint
from headrace_trainer.lineage.opening import open_lineage
from headrace_trainer.lineage.saved import Pointer, SavedState
from headrace_trainer.lineage.store import LineageStore, LineageTaken
from tests.unit.trainer.conftest import Make
from tests.unit.trainer.world import Bus, World, experience

POINTER = "lineages/main"


async def trained(world: World, make: Make, count: int = 8, **settings: Any) -> SavedState:
    """Train a lineage for two steps, unless `settings` differ, and return its saved state."""
    await world.run(make(**settings))
    version = world.bus.checkpoints[0].version
    world.bus.produce(*(experience(n, version, reward=n % 3) for n in range(count)))
    return saved_of(await world.run(make(**settings)))


def saved_of(trainer: object) -> SavedState:
    lineage = getattr(trainer, "lineage")  # noqa: B009
    saved: SavedState = lineage.saved
    return saved


def pointer_of(world: World) -> Pointer:
    newest = Records(world.blobs, POINTER).newest()
    assert newest is not None
    return Pointer.model_validate_json(newest.data)


def path_of(world: World, ref: BlobRef) -> Path:
    epoch = pointer_of(world).epochs.get(ref.sha256)
    area = world.folder / "blobs" / ("" if epoch is None else f"areas/{POINTER}/{epoch:010d}")
    return area / "sha256" / ref.sha256[:2] / ref.sha256


def state_ref(world: World) -> BlobRef:
    state = pointer_of(world).state
    assert state is not None
    return state


def replace_pointer(world: World, content: bytes) -> None:
    """Replace the pointer of the lineage, as another program might."""
    records = Records(world.blobs, POINTER)
    newest = records.newest()
    assert newest is not None
    assert records.append(newest.number, content)


def replace_state(world: World, content: bytes) -> None:
    """Store `content` as the state that the pointer names."""
    pointer = pointer_of(world)
    ref = world.blobs.area(f"{POINTER}/{pointer.epoch:010d}").put(content)
    changed = {"state": ref, "epochs": pointer.epochs | {ref.sha256: pointer.epoch}}
    replace_pointer(world, pointer.model_copy(update=changed).model_dump_json().encode())


def stored(world: World) -> set[str]:
    """Return all files in the areas of the owners."""
    names = world.blobs.areas(POINTER)
    return {digest for name in names for digest in world.blobs.area(f"{POINTER}/{name}").digests()}


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def test_what_was_saved_comes_back(world: World, make: Make) -> None:
    saved = await trained(world, make)
    assert saved.steps == 2
    assert LineageStore(world.blobs, "main").read() == saved
    again = open_lineage(make(), world.blobs, world.clock)
    assert again.state.snapshot() == {name: getattr(saved, name) for name in again.state.snapshot()}


@pytest.mark.parametrize("which", ["frame", "version", "optimizer", "state"])
@pytest.mark.parametrize("damage", ["missing", "truncated", "flipped"])
async def test_a_damaged_state_is_a_clear_crash(world: World, make: Make, which: str, damage: str) -> None:
    saved = await trained(world, make)
    present = saved.present
    assert present.assembly is not None
    weights = {"frame": present.assembly.frame, "version": present.assembly.files[0]}
    ref = {**weights, "optimizer": present.optimizer, "state": state_ref(world)}[which]
    path = path_of(world, ref)
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(content[:-1] if damage == "truncated" else content[:-1] + bytes([content[-1] ^ 1]))
    expected = Unavailable if damage == "missing" else CorruptBlob
    with pytest.raises(expected, match=rf"{POINTER}: .*{ref.sha256}.*restore the blob store from a backup"):
        await world.run(make())
    path.write_bytes(content)
    assert saved_of(await world.run(make())) == saved, "repaired from the backup, nothing else was touched"


@pytest.mark.parametrize("content", [b"", b"{}", b'{"state": 3}', b"\x80\x04"])
async def test_a_damaged_pointer_is_a_clear_crash(world: World, make: Make, content: bytes) -> None:
    await trained(world, make)
    replace_pointer(world, content)
    with pytest.raises(CorruptBlob, match=rf"{POINTER}: .*restore the blob store"):
        await world.run(make())


async def test_a_state_of_another_format_is_refused(world: World, make: Make) -> None:
    saved = await trained(world, make)
    other = saved.model_dump_json().replace('"format":1', '"format":2', 1).encode()
    replace_state(world, other)
    with pytest.raises(CorruptBlob, match=r"format: Input should be 1"):
        await world.run(make())


async def test_nothing_in_the_store_is_a_pickle(world: World, make: Make) -> None:
    await trained(world, make)
    files = [path for path in (world.folder / "blobs").rglob("*") if path.is_file() and len(path.name) == 64]
    assert len(files) > 10
    for path in files:
        start = path.read_bytes()[:2]
        assert start not in {b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05", b"PK"}


async def test_old_states_are_removed_and_versions_stay(world: World, make: Make) -> None:
    saved = await trained(world, make, count=40, max_staleness=20)
    used = set(saved.blobs()) | {state_ref(world).sha256}
    manifests = {checkpoint.manifest.sha256: checkpoint for checkpoint in world.bus.checkpoints}
    assert len(manifests) == 11
    of_versions = set(manifests)
    from headrace_runtime.storage.versions import read_manifest

    for checkpoint in manifests.values():
        of_versions |= {file.blob.sha256 for file in read_manifest(world.blobs, checkpoint.manifest).files}
    assert set(world.blobs.digests()) == of_versions
    assert stored(world) == used
    assert len(saved.restore_points) == make().memory.restore_points


async def test_a_lineage_has_one_trainer(world: World, make: Make) -> None:
    await trained(world, make)
    first, second = (open_lineage(make(), world.blobs, world.clock) for _ in range(2))
    second.save(publish=False)
    with pytest.raises(LineageTaken, match=r"lineage main belongs to process \d+ on .* now.*stop one of them"):
        first.save(publish=False)
    second.save(publish=False)


async def test_who_is_writing_when_the_lineage_is_taken_is_told_so(world: World, make: Make) -> None:
    """The new owner deletes unfinished files of the former owner, and the folder that it is writing to."""
    await trained(world, make)
    first = open_lineage(make(), world.blobs, world.clock)
    save = first.begin_save(publish=True)
    assert save.copy is not None
    written = save.copy.write

    def late(folder: Path, on_weights: Callable[[], None] | None = None) -> None:
        written(folder, on_weights)
        open_lineage(make(), world.blobs, world.clock).save(publish=False)

    save.copy = Late(save.copy.fingerprint, late)
    with pytest.raises(LineageTaken, match="belongs to process"):
        save.write()
    assert [path for path in (world.folder / "blobs").rglob("scratch/*") if path.is_dir()] == []
    open_lineage(make(), world.blobs, world.clock).save(publish=False)


@dataclass
class Late:
    """Copy of the weights that a test's function writes."""

    fingerprint: Fingerprint | None
    write: Callable[..., None]

    def drop(self) -> None: ...


async def test_two_lineages_share_a_store(world: World, make: Make) -> None:
    mine = await trained(world, make)
    world.bus = Bus()
    other_state = saved_of(await world.run(make(lineage="other")))
    assert other_state.steps == 0
    assert not set(mine.blobs()) & set(other_state.blobs())
    assert LineageStore(world.blobs, "main").read() == mine


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "other"}, r"trainer\.model = 'other': lineage main trains m"),
        ({"lora": {"rank": 4}}, r"trainer\.lora\.rank = 4: lineage main is trained as full"),
        ({"base": "nowhere"}, r"trainer\.base = 'nowhere': is not a folder"),
    ],
)
async def test_settings_of_another_lineage_are_refused(
    world: World, make: Make, change: dict[str, object], message: str
) -> None:
    await trained(world, make)
    with pytest.raises(SettingError, match=message):
        await world.run(make(**change))


async def test_adapters_of_another_shape_are_refused(world: World, make: Make) -> None:
    await world.run(make(lora={"rank": 4}))
    with pytest.raises(SettingError, match=r"does not fit the saved lineage"):
        await world.run(make(lora={"rank": 8}))


async def test_another_optimizer_is_refused(world: World, make: Make) -> None:
    await trained(world, make)
    with pytest.raises(SettingError, match=r"trainer\.optimizer\.kind = 'muon'"):
        await world.run(make(optimizer={"kind": "muon"}))


async def test_a_store_that_is_away_for_a_while_is_waited_for(
    world: World, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.run(make())
    world.bus.produce(*(experience(n, world.bus.checkpoints[0].version) for n in range(4)))
    put, failures = BlobStore.put, iter(range(2))

    def sometimes(self: BlobStore, data: bytes) -> BlobRef:
        if next(failures, None) is not None:
            raise Unavailable("away")
        return put(self, data)

    monkeypatch.setattr(BlobStore, "put", sometimes)
    saved = saved_of(await world.run(make()))
    assert saved.steps == 1
    assert world.bus.fates == {(f"e{n}", 0): "trained" for n in range(4)}
