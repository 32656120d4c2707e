r"""Decoding and validation of names in headers, path segments and record keys.

Bytes that are valid UTF-8 are decoded as UTF-8, all others as Latin-1, which is the encoding of Python's `http.client`.
Percent escapes of a path are decoded once before that; those of a header or a body stay as they are. No character is
replaced, dropped or folded, so names that only look alike (NFC and NFD, case, fullwidth, zero-width) stay different.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

NAME = r"^[^\x00-\x1f\x7f-\x9f]{1,512}$"
"""A name that a caller chooses: 1 to 512 characters without control characters, which would break ids and logs."""
_NAME = re.compile(NAME)
_SURROGATES = re.compile("[\ud800-\udfff]")


def decode_name(raw: bytes) -> str:
    """Decode `raw` as UTF-8 if it is valid UTF-8, otherwise as Latin-1."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def decode_segment(raw: bytes) -> str:
    """Decode one segment of a URL's path, including its percent escapes."""
    return decode_name(unquote_to_bytes(raw))


def decode_path(raw: bytes) -> str:
    """Decode a URL's path segment by segment. `%2F` becomes a slash within its segment."""
    return "/".join(map(decode_segment, raw.split(b"/")))


def is_name(text: str) -> bool:
    """Return whether `text` matches `NAME` and has no lone surrogates, which UTF-8 cannot encode."""
    return _NAME.fullmatch(text) is not None and _SURROGATES.search(text) is None
