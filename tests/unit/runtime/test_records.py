"""Compare-and-swap: of several writers that replace one value exactly one succeeds, on every kind of store."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import pytest

from headrace_runtime.errors import SettingError, Unavailable
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.records import _KEPT, Records


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path.as_uri() if request.param == "file" else f"memory://{tmp_path.name}")


@pytest.fixture
def records(store: BlobStore) -> Records:
    return Records(store, "lineages/main")


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
    """The same bytes at the same path mean that the write was ours."""
    assert records.append(0, b"a")
    assert records.append(0, b"a")


def test_one_of_many_at_once_succeeds(store: BlobStore) -> None:
    threads = 8
    barrier = threading.Barrier(threads)

    def race(name: int, number: int) -> bool:
        barrier.wait()
        return Records(store, "x").append(number, f"{name} {number}".encode())

    with ThreadPoolExecutor(threads) as pool:
        for number in range(20):
            assert sum(pool.map(race, range(threads), [number] * threads)) == 1


def test_old_records_go_and_their_numbers_do_not_come_back(store: BlobStore, records: Records) -> None:
    for number in range(3 * _KEPT):
        assert records.append(number, f"{number}".encode())
    assert len(store.pointers("records/lineages/main")) == _KEPT
    assert not records.append(2, b"far too late, and number 3 is free again")
    assert value(records) == f"{3 * _KEPT - 1}".encode()


def test_a_file_that_is_there_is_not_written(store: BlobStore) -> None:
    store.set_pointer("x", b"1")
    assert not store.create("x", b"2")
    assert store.pointer("x") == b"1"


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


def test_a_store_that_can_do_it_says_nothing(store: BlobStore) -> None:
    store.check_exclusive()
    assert store.pointers("probe") == []


@pytest.mark.parametrize("protocol", ["zip", "dummy"])
def test_a_store_that_cannot_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, protocol: str) -> None:
    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "protocol", protocol)
    store = BlobStore(f"memory://{tmp_path.name}")
    with pytest.raises(SettingError, match=r"setting blobs\.url = 'memory://.*cannot write a file only if"):
        store.check_exclusive()


def test_a_server_that_ignores_the_condition_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that accepts the header and overwrites the file, as some makers' object stores do."""
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


def test_a_refusal_in_words_of_its_own_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Client libraries turn "precondition failed" into exceptions of many kinds."""
    store = BlobStore(f"memory://{tmp_path.name}")
    store.set_pointer("x", b"1")

    def strange(*_: object, **__: object) -> None:
        raise RuntimeError("412")

    monkeypatch.setattr(store._fs, "pipe_file", strange)
    assert not store.create("x", b"2")
    with pytest.raises(RuntimeError):
        store.create("y", b"2")


def test_a_listing_while_files_come_and_go_is_whole(tmp_path: Path) -> None:
    """A draft that gets its name while the folder is listed must not make the folder look empty."""
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


def test_areas_are_stores_of_their_own(store: BlobStore) -> None:
    area = store.area("lineages/main/1")
    ref = area.put(b"x")
    area.set_pointer("beat", b"1")
    assert list(store.digests()) == []
    assert store.areas("lineages/main") == ["1"]
    assert area.get(ref) == b"x"
    store.remove_area("lineages/main/1")
    store.remove_area("lineages/main/1")
    assert store.areas("lineages/main") == []
    with pytest.raises(Unavailable):
        area.get(ref)
