"""Tokenizers of versions, read from the blob store to show the texts of tokens. Four of them are cached.

The console only converts ids to texts, for which the vocabulary in `tokenizer.json` is enough. It does not install the
`tokenizers` library, which has compiled code and a client of a model hub.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from headrace_console.sources.clients import RegistryReader
from headrace_runtime.errors import CorruptBlob, MissingBlob, Refused, Unavailable
from headrace_runtime.grammars.vocabulary import byte_level_table
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import read_manifest
from headrace_schemas.values.blobs import Manifest
from headrace_schemas.values.text import printable_lines

_CACHED_MAX = 4
_BYTES_MAX = 134_217_728
_FILE = "tokenizer.json"


class TokenizerReader:
    """Reader of the tokenizers of versions. Versions with equal tokenizers share one object."""

    def __init__(self, registry: RegistryReader, blobs: BlobStore) -> None:
        self._registry = registry
        self._blobs = blobs
        self._cache: OrderedDict[str, TokenTexts] = OrderedDict()
        self._digests: OrderedDict[str, str] = OrderedDict()
        self._lock = asyncio.Lock()

    async def read(self, version: str) -> tuple[TokenTexts | None, str]:
        """Return the tokenizer of a version, or None and the reason why it cannot be read."""
        async with self._lock:
            cached = self._cache.get(self._digests.get(version, ""))
            if cached is not None:
                self._cache.move_to_end(self._digests[version])
                return cached, ""
            try:
                manifest = await self._manifest(version)
                base = manifest if manifest.base is None else await self._manifest(manifest.base)
                digest = manifest.tokenizer_sha256
                texts = self._cache.get(digest)
                if texts is None:
                    texts = await asyncio.to_thread(self._load, base, digest)
            except (Refused, CorruptBlob, MissingBlob, Unavailable, ValueError) as error:
                return None, str(error)
            self._keep(version, digest, texts)
            return texts, ""

    async def _manifest(self, version: str) -> Manifest:
        model = version.partition("@")[0]
        states = [state for state in await self._registry.versions(model) if state.id == version]
        ref = states[0].manifest if states else None
        if ref is None:
            raise ValueError(f"{version} is not among the newest versions of the registry, or its files are unknown")
        return await asyncio.to_thread(read_manifest, self._blobs, ref)

    def _load(self, manifest: Manifest, digest: str) -> TokenTexts:
        file = next((file for file in manifest.files if file.path == _FILE and file.blob.sha256 == digest), None)
        if file is None:
            raise ValueError(f"the version has no {_FILE}")
        if file.blob.size > _BYTES_MAX:
            raise ValueError(f"{_FILE} has {file.blob.size:,} bytes; the console reads at most {_BYTES_MAX:,}")
        return TokenTexts(self._blobs.get(file.blob))

    def _keep(self, version: str, digest: str, texts: TokenTexts) -> None:
        self._digests[version] = digest
        if len(self._digests) > 64 * _CACHED_MAX:
            self._digests.popitem(last=False)
        self._cache[digest] = texts
        self._cache.move_to_end(digest)
        if len(self._cache) > _CACHED_MAX:
            self._cache.popitem(last=False)


_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_PIECE = "\u2581"
_TEXT_LENGTH_MAX = 400
_PIECE_LENGTH_MAX = 4 * _TEXT_LENGTH_MAX
"""Characters of a piece that are kept. A tokenizer may contain pieces of megabytes, which a page repeats."""


class TokenTexts:
    """Bytes and displayed text of each token of a tokenizer."""

    def __init__(self, content: bytes) -> None:
        """Read a `tokenizer.json`. Raises `ValueError` if `content` is not a valid one."""
        try:
            tokenizer = json.loads(content)
            self._pieces = _vocabulary(tokenizer["model"]["vocab"])
            added_tokens = tokenizer.get("added_tokens") or ()
            self._added = {int(token["id"]): str(token["content"])[:_PIECE_LENGTH_MAX] for token in added_tokens}
            kinds = _decoder_kinds(tokenizer.get("decoder"))
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
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
        """Return the text of a token for display, with control characters as visible symbols.

        An id that the tokenizer lacks is returned as text.
        """
        data = self.data(token_id)
        return f"\u27e8id {token_id}\u27e9" if data is None else visible_text(data)


def visible_text(data: bytes) -> str:
    """Return bytes as text. Bytes that are not a whole character are shown as hexadecimal numbers, such as ⟨E2 96⟩."""
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
    """Return the text of each token by its id.

    Args:
        vocabulary: field `vocab` of a `tokenizer.json`: ids by text or, for a unigram model, a list of texts with
            scores.
    """
    if isinstance(vocabulary, dict):
        return {int(token_id): str(piece)[:_PIECE_LENGTH_MAX] for piece, token_id in vocabulary.items()}
    return {token_id: str(entry[0])[:_PIECE_LENGTH_MAX] for token_id, entry in enumerate(vocabulary)}


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
