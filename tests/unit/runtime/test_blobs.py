"""P7: bytes match their name, or they are refused."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import fsspec
import pytest
from fsspec import register_implementation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_runtime.errors import CorruptBlob, SettingError, Unavailable
from headrace_runtime.storage.blobs import BlobStore
from tests.support import plugins

ODD = "Zoë's agents 100% #1?"
"""A folder that people have."""


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    """A folder, and an object store without rename."""
    return BlobStore((tmp_path / ODD).as_uri() if request.param == "file" else f"memory://{tmp_path.name}")


def test_blobs_are_in_the_folder_that_was_meant_and_found_by_their_references(tmp_path: Path) -> None:
    ref = BlobStore((tmp_path / ODD).as_uri()).put(b"x")
    assert [path.name for path in tmp_path.iterdir()] == [ODD]
    with fsspec.open(ref.uri, "rb") as file:
        assert file.read() == b"x"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=200))
def test_what_was_put_comes_back(store: BlobStore, data: bytes) -> None:
    ref = store.put(data)
    assert (ref.sha256, ref.size) == (hashlib.sha256(data).hexdigest(), len(data))
    assert store.get(ref) == data
    assert store.put(data) == ref, "putting twice is harmless"


def test_a_blob_that_was_never_put_is_unavailable(store: BlobStore) -> None:
    ref = store.put(b"x")
    store.delete(ref)
    store.delete(ref)
    with pytest.raises(Unavailable, match=ref.sha256):
        store.get(ref)


@pytest.mark.parametrize("damage", [b"", b"ab", b"abd", b"abcd"])
def test_damage_is_noticed(tmp_path: Path, damage: bytes) -> None:
    store = BlobStore(tmp_path.as_uri())
    ref = store.put(b"abc")
    Path(ref.uri.removeprefix("file://")).write_bytes(damage)
    with pytest.raises(CorruptBlob, match="do not hash to"):
        store.get(ref)


@pytest.mark.parametrize("move", [True, False])
def test_a_file_becomes_the_same_blob_as_its_bytes(store: BlobStore, tmp_path: Path, move: bool) -> None:
    with store.area("big").scratch() as folder:
        path = folder / "file"
        path.write_bytes(b"piece" * 1000)
        ref = store.put_file(path, move=move)
        assert path.exists() is not move
        assert store.put_file(path) == ref if not move else True
    assert not folder.exists()
    assert ref == store.put(b"piece" * 1000)
    assert store.get(ref) == b"piece" * 1000
    store.get_file(ref, tmp_path / "out" / "file")
    assert (tmp_path / "out" / "file").read_bytes() == b"piece" * 1000


def test_a_damaged_blob_becomes_no_file(tmp_path: Path) -> None:
    store = BlobStore((tmp_path / "blobs").as_uri())
    ref = store.put(b"abc")
    Path(ref.uri.removeprefix("file://")).write_bytes(b"abd")
    with pytest.raises(CorruptBlob, match="do not hash to"):
        store.get_file(ref, tmp_path / "out")
    store.delete(ref)
    with pytest.raises(Unavailable):
        store.get_file(ref, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_a_killed_process_left_in_the_scratch_folder_goes(tmp_path: Path) -> None:
    store = BlobStore(tmp_path.as_uri())
    with store.scratch() as folder:
        (folder / "half").write_bytes(b"half")
        store.remove_scratch()
        assert not folder.exists()


def test_digests_lists_every_blob_and_no_draft(tmp_path: Path) -> None:
    store = BlobStore(tmp_path.as_uri())
    refs = [store.put(bytes([n])) for n in range(3)]
    (tmp_path / "sha256" / refs[0].sha256[:2] / ".draft").write_bytes(b"half")
    assert set(store.digests()) == {ref.sha256 for ref in refs}


def test_a_pointer_is_replaced_whole(store: BlobStore) -> None:
    assert store.pointer("lineages/main") is None
    store.set_pointer("lineages/main", b"1")
    store.set_pointer("lineages/main", b"2")
    assert store.pointer("lineages/main") == b"2"


def test_a_store_that_cannot_be_written_is_unavailable(tmp_path: Path) -> None:
    (tmp_path / "pointers").write_bytes(b"in the way")
    store = BlobStore(tmp_path.as_uri())
    with pytest.raises(Unavailable, match="blob store"):
        store.set_pointer("lineages/main", b"1")
    with pytest.raises(Unavailable, match="blob store"):
        store.pointer("lineages/main")


def test_a_rename_is_durable_before_the_write_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    fsync = os.fsync

    def record(handle: int) -> None:
        synced.append(Path(f"/proc/self/fd/{handle}").readlink())
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    BlobStore(tmp_path.as_uri()).set_pointer("lineages/main", b"1")
    folder = tmp_path / "pointers" / "lineages"
    assert synced[0].parent == folder, "first the bytes"
    assert synced[1:] == [folder, folder.parent, tmp_path], "then its name, then the names of new folders"


def test_a_reference_is_known_before_the_blob_is_stored(store: BlobStore) -> None:
    ref = store.ref(b"x")
    assert ref.sha256 not in set(store.digests())
    assert store.put(b"x") == ref


async def test_the_async_forms_do_the_same(store: BlobStore) -> None:
    assert await store.aget(await store.aput(b"x")) == b"x"


SHELF = """
from fsspec.implementations.memory import MemoryFileSystem

from headrace_runtime.blob_backends import MEMORY as CREATES

class Shelf(MemoryFileSystem):
    protocol = "shelf"
    store = {}
    pseudo_dirs = [""]
"""


def test_a_store_of_somebody_elses_has_owners_once_it_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    announced = {"headrace.blobs": {"shelf": "shelves:CREATES"}}
    plugins.install(tmp_path / "announced", "shelves", announced)
    plugins.install(tmp_path, "other", {}, shelves=SHELF)
    monkeypatch.syspath_prepend(str(tmp_path))
    register_implementation("shelf", "shelves.Shelf", clobber=True)
    store = BlobStore("shelf://here")
    assert store.get(store.put(b"x")) == b"x"
    with pytest.raises(SettingError, match="cannot write a file only if it does not exist"):
        store.create("owner", b"1")
    monkeypatch.syspath_prepend(str(tmp_path / "announced"))
    store = BlobStore("shelf://here")
    assert [store.create("owner", b"1"), store.create("owner", b"2")] == [True, False]
    store.check_exclusive()
