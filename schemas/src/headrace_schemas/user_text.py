"""Decoding of text files that people write, with the same message for every wrong encoding."""

from __future__ import annotations

import codecs
from pathlib import Path

_PROBED_BYTES = 200
_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def decode_text(content: bytes, line: int = 1) -> str:
    """Decode the content of a file in UTF-8, with or without a byte order mark.

    Args:
        content: the content of the file, or a part of it.
        line: the number of the first line in `content`, for the message.

    Raises:
        ValueError: the content has another encoding. The message is a sentence without its subject, the file.
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
    """Return whether `content` seems to be UTF-16, with or without a byte order mark."""
    return content.startswith(_UTF_16) or b"\x00" in content[:_PROBED_BYTES]


def read_user_text(path: Path) -> str:
    """Read a text file that a person wrote, and convert its line ends to `\\n`.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not in UTF-8, as in `decode_text`.
    """
    return decode_text(path.read_bytes()).replace("\r\n", "\n")
