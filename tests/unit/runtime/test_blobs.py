"""Tests of the blob store: bytes that do not match their digest are refused (P7), and compare-and-swap has one
winner."""

from __future__ import annotations

import hashlib
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec import register_implementation
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace_runtime.errors import CorruptBlob, SettingError, Unavailable
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.records import _KEPT, Records
from tests.support import packages

ODD = "Zoë's agents 100% #1?"
"""A folder that people have."""


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    """Return a store in a folder, or an object store without rename."""
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


@pytest.mark.parametrize("claimed", [0, 1, 10])
def test_a_reference_that_claims_a_small_size_does_not_load_a_large_blob(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch, claimed: int
) -> None:
    ref = store.put(b"x" * 100_000)
    sizes: list[int] = []
    cat_file = store._fs.cat_file

    def load(*arguments: Any, **options: Any) -> bytes:
        data: bytes = cat_file(*arguments, **options)
        sizes.append(len(data))
        return data

    monkeypatch.setattr(store._fs, "cat_file", load)
    with pytest.raises(CorruptBlob):
        store.get(ref.model_copy(update={"size": claimed}))
    assert max(sizes, default=0) <= claimed + 1


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
    packages.install(tmp_path / "announced", "shelves", announced)
    packages.install(tmp_path, "other", {}, shelves=SHELF)
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


@pytest.fixture(params=["file", "memory"])
def record_store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path.as_uri() if request.param == "file" else f"memory://{tmp_path.name}")


@pytest.fixture
def records(record_store: BlobStore) -> Records:
    return Records(record_store, "lineages/main")


def value(records: Records) -> bytes | None:
    record = records.newest()
    return record.data if record else None


def test_the_second_one_is_told(records: Records) -> None:
    assert records.newest() is None
    assert records.append(0, b"a")
    assert not records.append(0, b"b")
    assert records.append(1, b"c")
    assert not records.append(1, b"d")
    assert value(records) == b"c"


def test_a_lost_answer_is_no_lost_value(records: Records) -> None:
    """If the response is lost, equal bytes at the path mean that this write succeeded."""
    assert records.append(0, b"a")
    assert records.append(0, b"a")


def test_one_of_many_at_once_succeeds(record_store: BlobStore) -> None:
    threads = 8
    barrier = threading.Barrier(threads)

    def race(name: int, number: int) -> bool:
        barrier.wait()
        return Records(record_store, "x").append(number, f"{name} {number}".encode())

    with ThreadPoolExecutor(threads) as pool:
        for number in range(20):
            assert sum(pool.map(race, range(threads), [number] * threads)) == 1


def test_old_records_go_and_their_numbers_do_not_come_back(record_store: BlobStore, records: Records) -> None:
    for number in range(3 * _KEPT):
        assert records.append(number, f"{number}".encode())
    assert len(record_store.pointers("records/lineages/main")) == _KEPT
    assert not records.append(2, b"far too late, and number 3 is free again")
    assert value(records) == f"{3 * _KEPT - 1}".encode()


def test_a_file_that_is_there_is_not_written(record_store: BlobStore) -> None:
    record_store.set_pointer("x", b"1")
    assert not record_store.create("x", b"2")
    assert record_store.pointer("x") == b"1"


def test_a_created_file_is_whole_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BlobStore(tmp_path.as_uri())

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(Unavailable, match="No space left"):
        store.create("x", b"1")
    monkeypatch.undo()
    assert store.pointer("x") is None
    assert list((tmp_path / "pointers").iterdir()) == [], "and no draft stays"


def test_a_store_that_can_do_it_says_nothing(record_store: BlobStore) -> None:
    record_store.check_exclusive()
    assert record_store.pointers("probe") == []


@pytest.mark.parametrize("protocol", ["zip", "dummy"])
def test_a_store_that_cannot_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "protocol", protocol)
    store = BlobStore(f"memory://{tmp_path.name}")
    with pytest.raises(SettingError, match=r"setting blobs\.url = 'memory://.*cannot write a file only if"):
        store.check_exclusive()


def test_a_server_that_ignores_the_condition_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some makers' object stores accept the conditional header and overwrite the file anyway."""
    store = BlobStore(f"memory://{tmp_path.name}")
    fs = fsspec.filesystem("memory", skip_instance_cache=True)
    pipe = fs.pipe_file
    monkeypatch.setattr(fs, "pipe_file", lambda path, data, mode="": pipe(path, data))
    monkeypatch.setattr(store, "_fs", fs)
    with pytest.raises(SettingError, match=r"blobs\.url.*replaced a file"):
        store.check_exclusive()


def test_a_folder_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refused)
    with pytest.raises(SettingError, match=r"blobs\.url.*no hard links"):
        BlobStore(tmp_path.as_uri()).check_exclusive()


def test_create_recognizes_an_existing_file_after_any_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client libraries report "precondition failed" by different exceptions."""
    store = BlobStore(f"memory://{tmp_path.name}")
    store.set_pointer("x", b"1")

    def strange(*_: object, **__: object) -> None:
        raise RuntimeError("412")

    monkeypatch.setattr(store._fs, "pipe_file", strange)
    assert not store.create("x", b"2")
    with pytest.raises(RuntimeError):
        store.create("y", b"2")


def test_a_listing_while_files_come_and_go_is_whole(tmp_path: Path) -> None:
    """A draft file that is renamed during the listing must not make the folder look empty."""
    store, stop = BlobStore(tmp_path.as_uri()), threading.Event()
    store.set_pointer("x/0", b"here all the time")

    def churn() -> None:
        while not stop.is_set():
            store.set_pointer("x/1", b"1")

    with ThreadPoolExecutor(2) as pool:
        churning = [pool.submit(churn) for _ in range(2)]
        try:
            assert all("0" in store.pointers("x") for _ in range(2000))
        finally:
            stop.set()
        for writer in churning:
            writer.result()


def test_areas_are_stores_of_their_own(record_store: BlobStore) -> None:
    area = record_store.area("lineages/main/1")
    ref = area.put(b"x")
    area.set_pointer("beat", b"1")
    assert list(record_store.digests()) == []
    assert record_store.areas("lineages/main") == ["1"]
    assert area.get(ref) == b"x"
    record_store.remove_area("lineages/main/1")
    record_store.remove_area("lineages/main/1")
    assert record_store.areas("lineages/main") == []
    with pytest.raises(Unavailable):
        area.get(ref)
