"""Text files that people write: decoded in one place, so that every wrong encoding is named by the same sentence."""

from __future__ import annotations

import codecs
from pathlib import Path

_PROBED_BYTES = 200
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decode_text(content: bytes, line: int = 1) -> str:
    """Return the text of a file in UTF-8, with or without a byte order mark.

    Args:
        line: the number of the first line in `content`, for the message.

    Raises:
        ValueError: a sentence without its subject: in which encoding the file seems to be.
    """
    if is_utf_16(content):
        raise ValueError("is in UTF-16; save it as UTF-8")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        number = line + content.count(b"\n", 0, error.start)
        raise ValueError(
            f"is not in UTF-8 (byte 0x{content[error.start]:02x} in line {number}; Latin-1 perhaps); save it as UTF-8"
        ) from None


def is_utf_16(content: bytes) -> bool:
    """Return whether the first bytes of a file are those of UTF-16, with or without a byte order mark."""
    return content.startswith(_UTF_16) or b"\x00" in content[:_PROBED_BYTES]


def read_user_text(path: Path) -> str:
    """Return the text of a file that a person wrote, with line ends as `\\n`. Raises `OSError`, and `ValueError` as
    `decode_text` does."""
    return decode_text(path.read_bytes()).replace("\r\n", "\n")
