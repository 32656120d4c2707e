r"""Names that arrive as bytes: how a header, a path segment or a record's key becomes text, and which are refused.

The rule: bytes that are valid UTF-8 are read as UTF-8, all others as Latin-1, which is what Python's `http.client`
sends. Percent forms of a path are decoded once, before that; those of a header or a body stay as they are. No character
is replaced, dropped or folded, so names that only look alike (NFC and NFD, case, fullwidth, zero-width) stay different.
"""

from __future__ import annotations

import re
from urllib.parse import unquote_to_bytes

NAME = r"^[^\x00-\x1f\x7f-\x9f]{1,512}$"
"""A name that a caller chooses: 1 to 512 characters without control characters, which would break ids and logs."""
_NAME = re.compile(NAME)
_SURROGATES = re.compile("[\ud800-\udfff]")


def decode_name(raw: bytes) -> str:
    """Return `raw` as text, in UTF-8 where it is valid and else in Latin-1; different bytes of one encoding differ."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def decode_segment(raw: bytes) -> str:
    """Return one segment of a URL's path as text, its percent forms decoded once."""
    return decode_name(unquote_to_bytes(raw))


def decode_path(raw: bytes) -> str:
    """Return a URL's path as text, segment by segment: `%2F` becomes a slash of its segment."""
    return "/".join(map(decode_segment, raw.split(b"/")))


def is_name(text: str) -> bool:
    """Return whether `text` may name something: see `NAME`. Lone surrogates, which UTF-8 cannot hold, are refused."""
    return _NAME.fullmatch(text) is not None and _SURROGATES.search(text) is None
