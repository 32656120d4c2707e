"""Blobs of records are fetched from a blob store and verified against their digest."""

from __future__ import annotations

import hashlib
import socket
from pathlib import Path

import pytest

from headrace.errors import HeadraceError
from headrace.topics import event_of, fetch
from headrace_schemas.values.blobs import BlobRef
from tests.support.account_events import experience


def stored(path: Path, data: bytes) -> BlobRef:
    digest = hashlib.sha256(data).hexdigest()
    path.mkdir()
    (path / digest).write_bytes(data)
    return BlobRef(uri=(path / digest).as_uri(), sha256=digest, size=len(data))


async def test_event_is_read_from_the_blob_store(tmp_path: Path) -> None:
    event = experience("E", "a")
    ref = stored(tmp_path / "blob", event.to_json())
    read = await event_of("experiences", ref.model_dump_json().encode(), [("ce_dataref", ref.uri.encode())])
    assert read == event


def test_blob_with_another_digest_is_refused(tmp_path: Path) -> None:
    ref = stored(tmp_path / "blob", b"data")
    (tmp_path / "blob" / ref.sha256).write_bytes(b"date")
    with pytest.raises(HeadraceError, match=r"blob file://.* its content does not match the digest in its name"):
        fetch(ref)


@pytest.mark.parametrize(
    "uri",
    [
        "http://127.0.0.1:{port}/{digest}", "https://evil.example/{digest}", "ftp://evil.example/{digest}",
        "simplecache::http://127.0.0.1:{port}/{digest}", "file:///etc/passwd", "filecache::file:///x/{digest}",
        "HTTP://127.0.0.1:{port}/{digest}", "webhdfs://evil.example/{digest}", "s3://bucket/other",
    ],
)  # fmt: skip
def test_a_record_cannot_name_another_server_or_file(uri: str) -> None:
    digest = hashlib.sha256(b"data").hexdigest()
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        ref = BlobRef(uri=uri.format(port=server.getsockname()[1], digest=digest), sha256=digest, size=4)
        with pytest.raises(HeadraceError, match="is not in a blob store"):
            fetch(ref)
        with pytest.raises(TimeoutError):
            server.accept()
