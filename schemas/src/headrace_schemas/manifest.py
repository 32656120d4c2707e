"""What a version is made of. The manifest's own digest names the version, so nothing in it can change later (P7)."""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from headrace_schemas.arrays import Logprobs, TokenIds
from headrace_schemas.base import Model, ModelName, Sha256, Text, Version
from headrace_schemas.blobs import BlobRef

DIGEST_LENGTH = 16
"""Hex digits of the manifest's SHA-256 in a version's name."""


_TOKENS = frozenset(
    (
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "chat_template.json",
    )
)


class File(Model):
    """One file of a version, relative to its root. Weights are safetensors; pickles are refused by name."""

    path: Text
    blob: BlobRef

    @field_validator("path")
    @classmethod
    def _inside_and_no_pickle(cls, path: str) -> str:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts:
            raise ValueError(f"{path!r} leaves the version's folder")
        if pure.suffix in {".bin", ".pt", ".pth", ".pkl", ".ckpt"}:
            raise ValueError(f"{path!r} may hold a pickle; only safetensors carry weights")
        return path


class Fingerprint(Model):
    """The answer of the weights to fixed tokens: the log-probability of each of `token_ids[1:]` at temperature 1.

    Written by the trainer, compared by the engine after loading.
    """

    token_ids: TokenIds
    logprobs: Logprobs

    @model_validator(mode="after")
    def _one_logprob_per_predicted_token(self) -> Self:
        if len(self.token_ids) < 2 or len(self.logprobs) != len(self.token_ids) - 1:
            raise ValueError(
                f"{len(self.token_ids)} tokens need {len(self.token_ids) - 1} logprobs, got {len(self.logprobs)}"
            )
        return self


class Manifest(Model):
    """The immutable description of one version of a model."""

    name: ModelName
    lineage: Text
    step: Annotated[int, Field(ge=0)]
    """Versions published in this lineage before this one; staleness is counted in it (P5)."""
    parent: Version | None = None
    kind: Literal["full", "lora"] = "full"
    base: Version | None = None
    """The full version that a LoRA adapter applies to."""
    files: tuple[File, ...] = Field(min_length=1, max_length=4096)
    fingerprint: Fingerprint
    tokenizer_sha256: Sha256
    """Of `tokenizer.json`."""
    template_sha256: Sha256
    """Of `chat_template.jinja` where that is the only template, else of all templates wherever they stand. An adapter
    has both digests from its base."""

    @model_validator(mode="after")
    def _lora_has_a_base(self) -> Self:
        if (self.kind == "lora") != (self.base is not None):
            raise ValueError(
                f"kind {self.kind!r} with base {self.base!r}: an adapter needs a base, full weights have none"
            )
        return self

    def canonical_json(self) -> bytes:
        """The bytes that are stored and hashed: sorted keys, no spaces, no nulls."""
        data = self.model_dump(mode="json", exclude_none=True)
        return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def acting_files(self) -> dict[str, str]:
        """SHA-256 by path of the files that can change a prompt or the end of an answer: all but the weights. An
        adapter has none, because those of its base apply."""
        own = self.files if self.kind == "full" else ()
        return {f.path: f.blob.sha256 for f in own if not f.path.endswith((".safetensors", ".safetensors.index.json"))}

    @property
    def token_files(self) -> dict[str, str]:
        """Those of `acting_files` that decide which tokens a conversation becomes."""
        found = ((PurePosixPath(path), sha256) for path, sha256 in self.acting_files.items())
        return {str(path): sha for path, sha in found if str(path) in _TOKENS or path.suffix in {".jinja", ".model"}}

    @property
    def prompt_sha256(self) -> str:
        """Equal for versions that tokenize every conversation alike. For an adapter, that of its base counts."""
        parts = [self.tokenizer_sha256, self.template_sha256, self.acting_files]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def version(self) -> str:
        return f"{self.name}@{hashlib.sha256(self.canonical_json()).hexdigest()[:DIGEST_LENGTH]}"
