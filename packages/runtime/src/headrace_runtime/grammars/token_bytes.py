"""The bytes that each token of a vocabulary stands for, independent of the vocabulary's spelling.

Byte-level vocabularies write a byte as a printable letter (GPT-2's table). SentencePiece writes a space as `▁` and a
byte without a piece as `<0xE2>`. Converters mix both. So the spelling is not trusted: each interpretation of a token is
compared with the decoder's text of the token after another token.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHORS = ("a", "x", "0", "e")


@dataclass(frozen=True)
class TokenBytes:
    """Bytes of each token.

    `data[i]` are the bytes of token `i`; None if it has none, or if decoding it yields other text. `unlike` maps tokens
    whose decoded text differs from their spelling to that text.
    """

    data: Sequence[bytes | None]
    unlike: Mapping[str, str]


@cache
def byte_level_table() -> Mapping[str, int]:
    """Return GPT-2's table from letters to bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    unprintable = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + index): byte for index, byte in enumerate(unprintable)}
    return {**{chr(byte): byte for byte in printable}, **shifted}


def read_token_bytes(inner: Any, size: int) -> TokenBytes:
    """Read the first `size` ids of a `tokenizers.Tokenizer`."""
    added = {number: token.content for number, token in inner.get_added_tokens_decoder().items()}
    names = {number: name for name, number in inner.get_vocab(with_added_tokens=True).items() if number < size}
    decoded = _decoded_behind_another(inner, names)
    data: list[bytes | None] = [None] * size
    unlike: dict[str, str] = {}
    for number, name in names.items():
        text = decoded.get(number)
        if text is None:
            unlike[name] = "(decoding it changes the token before it)"
            continue
        spelled = [added[number].encode()] if number in added else _spellings(name, text)
        data[number] = next((spelling for spelling in spelled if spelling.decode("utf-8", "replace") == text), None)
        if data[number] is None:
            unlike[name] = text
    return TokenBytes(data, unlike)


def _spellings(name: str, text: str) -> Iterator[bytes]:
    """Yield the interpretations of a token's name, then the decoded text itself if it is complete."""
    byte = _BYTE.fullmatch(name)
    if byte is not None:
        yield bytes([int(byte[1], 16)])
    table = byte_level_table()
    if all(letter in table for letter in name):
        yield bytes(table[letter] for letter in name)
    if "\N{REPLACEMENT CHARACTER}" not in text or name == text:
        yield text.encode()


def _decoded_behind_another(inner: Any, names: Mapping[int, str]) -> dict[int, str]:
    """Return the text that each token adds after another token. At the beginning of a text decoders strip spaces."""
    anchor = next((ids[-1] for text in _ANCHORS if (ids := inner.encode(text, add_special_tokens=False).ids)), None)
    if anchor is None:
        return {}
    before = inner.decode([anchor, anchor], skip_special_tokens=False)
    numbers = list(names)
    pairs = inner.decode_batch([[anchor, anchor, number] for number in numbers], skip_special_tokens=False)
    return {number: text[len(before) :] for number, text in zip(numbers, pairs, strict=True) if text.startswith(before)}
