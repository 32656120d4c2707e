"""Compressed request bodies: gzip, deflate and zstd, decompressed to at most as many bytes as a plain body may have."""

from __future__ import annotations

import zlib

import cramjam

from headrace_gateway.refusals import ApiError

SUPPORTED = ("gzip", "deflate", "zstd")
_GZIP_WINDOW = 31
"""zlib's mark for a gzip stream with the largest window."""
_MEMBERS_MAX = 100
"""Most members of a gzip body. Each costs a copy of the rest of the body."""


class _TooLarge(Exception):
    """The decompressed body is larger than its bound."""


def decoded(body: bytes, encoding: str, bytes_max: int) -> bytes:
    """Return the decompressed body. It may run in any thread.

    Raises:
        ApiError: 400 for a damaged body or one of too many gzip members, 413 for one of more than `bytes_max` bytes.
    """
    try:
        if encoding == "zstd":
            return _zstd(body, bytes_max)
        return _zlib(body, _GZIP_WINDOW if encoding == "gzip" else zlib.MAX_WBITS, bytes_max)
    except (zlib.error, cramjam.DecompressionError):
        message = f"the request body is not valid {encoding}; send it whole, or without content-encoding"
        raise ApiError(400, "invalid_encoding", message) from None
    except _TooLarge:
        message = f"the request body is larger than {bytes_max} bytes after decompression"
        raise ApiError(413, "body_too_large", message) from None


def _zlib(body: bytes, window: int, bytes_max: int) -> bytes:
    """Decompress all members of a gzip body, or one deflate stream."""
    parts: list[bytes] = []
    remaining = bytes_max
    while body:
        if len(parts) == _MEMBERS_MAX:
            message = f"the request body has more than {_MEMBERS_MAX} gzip members; compress it as one"
            raise ApiError(400, "invalid_encoding", message)
        stream = zlib.decompressobj(window)
        parts.append(stream.decompress(body, remaining + 1))
        remaining -= len(parts[-1])
        if remaining < 0:
            raise _TooLarge
        if not stream.eof:
            raise zlib.error("the stream ends too early")
        body = stream.unused_data
    return b"".join(parts)


def _zstd(body: bytes, bytes_max: int) -> bytes:
    buffer = bytearray(bytes_max + 1)
    try:
        length = cramjam.zstd.decompress_into(body, buffer)
    except cramjam.DecompressionError as error:
        if "whole buffer" in str(error):
            raise _TooLarge from None
        raise
    if length > bytes_max:
        raise _TooLarge
    return bytes(memoryview(buffer)[:length])
