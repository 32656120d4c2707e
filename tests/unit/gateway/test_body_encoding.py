"""Compressed request bodies, and bodies that are larger than they look."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import cramjam
import pytest

from headrace_gateway.body_encoding import decoded
from headrace_gateway.refusals import ApiError
from headrace_gateway.settings import LimitSettings
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import gateway


def zstd(data: bytes) -> bytes:
    return bytes(cramjam.zstd.compress(data))


COMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd}


@pytest.mark.parametrize("encoding", COMPRESS)
def test_a_body_comes_back_up_to_its_bound_and_not_beyond(encoding: str) -> None:
    data = b"abc" * 1000
    compressed = COMPRESS[encoding](data)
    assert decoded(compressed, encoding, len(data)) == data
    for bomb in (compressed, COMPRESS[encoding](b"0" * 50_000_000)):
        with pytest.raises(ApiError) as caught:
            decoded(bomb, encoding, len(data) - 1)
        assert (caught.value.status, caught.value.code) == (413, "body_too_large")


@pytest.mark.parametrize("encoding", COMPRESS)
def test_a_damaged_body_is_refused(encoding: str) -> None:
    compressed = COMPRESS[encoding](b"abc" * 1000)
    for damaged in (b"no such thing", compressed[:-4]):
        with pytest.raises(ApiError) as caught:
            decoded(damaged, encoding, 100_000)
        assert (caught.value.status, caught.value.code) == (400, "invalid_encoding")


def test_a_gzip_body_may_have_several_members() -> None:
    assert decoded(gzip.compress(b"a") + gzip.compress(b"b"), "gzip", 10) == b"ab"


@pytest.mark.parametrize("encoding", COMPRESS)
async def test_a_compressed_call_is_served_and_a_large_one_refused(tmp_path: Path, encoding: str) -> None:
    limits = LimitSettings(body_bytes_max=10_000)
    async with FakeReplica().running() as replica, gateway(tmp_path, replica, limits_per_key=limits) as served:
        for length, status in ((10, 200), (20_000, 413)):
            body = {"model": "tiny", "messages": [{"role": "user", "content": "x" * length}]}
            headers = {"content-encoding": encoding, "content-type": "application/json"}
            content = COMPRESS[encoding](json.dumps(body).encode())
            answer = await served.client.post("/v1/chat/completions", content=content, headers=headers)
            assert answer.status_code == status, answer.text
