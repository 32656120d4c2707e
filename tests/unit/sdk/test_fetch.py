"""What a record refers to is fetched from where it says, and believed only if it hashes to its name."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from headrace.errors import HeadraceError
from headrace.topics import event_of, fetch
from headrace_schemas.blobs import BlobRef
from tests.support.account_events import experience


def stored(path: Path, data: bytes) -> BlobRef:
    path.write_bytes(data)
    return BlobRef(uri=path.as_uri(), sha256=hashlib.sha256(data).hexdigest(), size=len(data))


async def test_an_event_is_read_from_where_it_lies(tmp_path: Path) -> None:
    event = experience("E", "a")
    ref = stored(tmp_path / "blob", event.to_json())
    read = await event_of("experiences", ref.model_dump_json().encode(), [("ce_dataref", ref.uri.encode())])
    assert read == event


def test_other_bytes_are_refused(tmp_path: Path) -> None:
    ref = stored(tmp_path / "blob", b"data")
    (tmp_path / "blob").write_bytes(b"date")
    with pytest.raises(HeadraceError, match=r"blob file://.* does not hash to its name; restore it"):
        fetch(ref)
