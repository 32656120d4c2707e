"""Tokenizers of versions, read from the blob store. The four that were used last are cached."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from headrace_console.sources.registry import RegistryReader
from headrace_console.token_texts import TokenTexts
from headrace_runtime.errors import CorruptBlob, MissingBlob, Refused, Unavailable
from headrace_runtime.storage.blobs import BlobStore
from headrace_runtime.storage.versions import read_manifest
from headrace_schemas.values.blobs import Manifest

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
