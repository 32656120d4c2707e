"""Texts of single tokens, from the `tokenizer.json` of a version.

A text is needed for an id and never the other way round, so the vocabulary of the file is enough. The library that
tokenizes prompts is not, which would bring compiled code and a client of a model hub into a service for browsers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from headrace_runtime.grammars.vocabulary import byte_level_table
from headrace_schemas.values.text import printable_lines

_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_PIECE = "\u2581"
_TEXT_LENGTH_MAX = 400


class TokenTexts:
    """The bytes of each token of a tokenizer."""

    def __init__(self, content: bytes) -> None:
        """Read a `tokenizer.json`. Raises `ValueError` if `content` is not a valid one."""
        try:
            tokenizer = json.loads(content)
            self._pieces = _vocabulary(tokenizer["model"]["vocab"])
            self._added = {int(token["id"]): str(token["content"]) for token in tokenizer.get("added_tokens") or ()}
            kinds = _decoder_kinds(tokenizer.get("decoder"))
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"the tokenizer cannot be read: {type(error).__name__}") from None
        self._is_byte_level = "ByteLevel" in kinds
        self._has_space_pieces = bool(kinds & {"Metaspace", "Replace"})
        self._has_byte_pieces = "ByteFallback" in kinds

    def data(self, token_id: int) -> bytes | None:
        """Return the bytes of a token, or None for an id that the tokenizer lacks."""
        if token_id in self._added:
            return self._added[token_id].encode("utf-8", "surrogatepass")
        piece = self._pieces.get(token_id)
        if piece is None:
            return None
        if self._is_byte_level and all(character in byte_level_table() for character in piece):
            return bytes(byte_level_table()[character] for character in piece)
        single = _BYTE_PIECE.fullmatch(piece) if self._has_byte_pieces else None
        if single is not None:
            return bytes.fromhex(single[1])
        if self._has_space_pieces:
            piece = piece.replace(_SPACE_PIECE, " ")
        return piece.encode("utf-8", "surrogatepass")

    def text(self, token_id: int) -> str:
        """Return the text of a token with visible control characters, and its id if the tokenizer lacks it."""
        data = self.data(token_id)
        return f"\u27e8id {token_id}\u27e9" if data is None else visible_text(data)


def visible_text(data: bytes) -> str:
    """Return bytes as text. Bytes that are no whole character are shown as hexadecimal numbers, such as ⟨E2 96⟩."""
    parts: list[str] = []
    broken = b""
    while data:
        try:
            text, invalid, data = data.decode(), b"", b""
        except UnicodeDecodeError as error:
            text, invalid, data = data[: error.start].decode(), data[error.start : error.end], data[error.end :]
        if text and broken:
            parts.append(_hexadecimal(broken))
            broken = b""
        parts.append(printable_lines(text, _TEXT_LENGTH_MAX))
        broken += invalid
    return "".join([*parts, _hexadecimal(broken)]) if broken else "".join(parts)


def _hexadecimal(data: bytes) -> str:
    return f"\u27e8{data.hex(' ').upper()}\u27e9"


def _vocabulary(vocabulary: Any) -> Mapping[int, str]:
    """Return pieces by id, from a table of ids or, for a unigram model, from a list of pieces with their scores."""
    if isinstance(vocabulary, dict):
        return {int(token_id): str(piece) for piece, token_id in vocabulary.items()}
    return {token_id: str(entry[0]) for token_id, entry in enumerate(vocabulary)}


def _decoder_kinds(decoder: Any) -> set[str]:
    """Return the kinds of a decoder and of the decoders in it. `Replace` counts if it replaces the space piece."""
    if not isinstance(decoder, dict):
        return set()
    kinds = {str(decoder.get("type"))}
    if kinds == {"Replace"} and (decoder.get("pattern") or {}).get("String") != _SPACE_PIECE:
        kinds = set()
    for inner in decoder.get("decoders") or ():
        kinds |= _decoder_kinds(inner)
    return kinds
