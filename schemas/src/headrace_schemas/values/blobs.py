"""References to blobs, which hold content that is too large for a topic, and the manifest of a version's files."""

from __future__ import annotations

import hashlib
import json
from pathlib import PurePosixPath
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from headrace_schemas.values.base import Logprobs, Model, ModelName, Sha256, Text, TokenIds, Version
from headrace_schemas.values.bounds import INT64

PAYLOAD_BYTES_MAX = 262_144
"""Event values of more bytes are stored as blobs, and their records contain a `BlobRef`."""
EVENT_BYTES_MAX = 268_435_456
"""Largest event. A record may refer to any blob, also to the weights of a model, and readers load events whole."""


class BlobRef(Model):
    """Location, size and digest of a blob. Readers check size and digest before they use the content."""

    uri: Text
    sha256: Sha256
    size: Annotated[int, Field(ge=0), INT64]

    def matches(self, data: bytes) -> bool:
        """Return whether `data` has the size and the digest of the blob."""
        return len(data) == self.size and hashlib.sha256(data).hexdigest() == self.sha256


DIGEST_LENGTH = 16
"""Number of hex digits of the manifest's SHA-256 in a version's name."""


_TOKENIZER_FILES = frozenset(
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
    """One file of a version, relative to its folder. Weights must be safetensors; names of pickles are refused."""

    path: Text
    blob: BlobRef

    @field_validator("path")
    @classmethod
    def _inside_and_no_pickle(cls, path: str) -> str:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts:
            raise ValueError(f"{path!r} is outside the version's folder")
        if pure.suffix in {".bin", ".pt", ".pth", ".pkl", ".ckpt"}:
            raise ValueError(f"{path!r} may contain a pickle; store the weights as safetensors")
        return path


class Fingerprint(Model):
    """Logprobs of the fixed tokens `token_ids[1:]` at temperature 1, by which a version's weights are recognised.

    The trainer computes them, and the engine compares its own with them after loading the weights.
    """

    token_ids: TokenIds
    logprobs: Logprobs
    dtype: Literal["bfloat16"] | None = None
    """Type of the weights and products with which they were computed; None is float32. An engine whose type is not set
    serves the version in the same one."""

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
    """Number of versions that this lineage published earlier. Staleness is a difference of these numbers."""
    parent: Version | None = None
    kind: Literal["full", "lora"] = "full"
    base: Version | None = None
    """The full version that a LoRA adapter applies to."""
    files: tuple[File, ...] = Field(min_length=1, max_length=4096)
    fingerprint: Fingerprint
    tokenizer_sha256: Sha256
    """Digest of `tokenizer.json`. An adapter copies it from its base."""
    template_sha256: Sha256
    """Digest of `chat_template.jinja` if that is the only template, otherwise of all templates in all files. An adapter
    copies it from its base."""

    @model_validator(mode="after")
    def _lora_has_a_base(self) -> Self:
        if (self.kind == "lora") != (self.base is not None):
            raise ValueError(
                f"kind {self.kind!r} with base {self.base!r}: an adapter needs a base, full weights have none"
            )
        return self

    def canonical_json(self) -> bytes:
        """Return the bytes that are stored and hashed: sorted keys, no spaces, no nulls."""
        data = self.model_dump(mode="json", exclude_none=True)
        return json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def non_weight_files(self) -> dict[str, str]:
        """SHA-256 by path of all files except the weights: those that can change a prompt or the end of an answer.

        It is empty for an adapter, because the files of its base apply.
        """
        files = self.files if self.kind == "full" else ()
        return {
            file.path: file.blob.sha256
            for file in files
            if not file.path.endswith((".safetensors", ".safetensors.index.json"))
        }

    @property
    def token_files(self) -> dict[str, str]:
        """The entries of `non_weight_files` that determine the tokens of a conversation."""
        return {
            path: sha256
            for path, sha256 in self.non_weight_files.items()
            if path in _TOKENIZER_FILES or PurePosixPath(path).suffix in {".jinja", ".model"}
        }

    @property
    def prompt_sha256(self) -> str:
        """A digest that is equal for versions that tokenize every conversation alike.

        For an adapter the digest has no meaning; use that of its base.
        """
        parts = [self.tokenizer_sha256, self.template_sha256, self.non_weight_files]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    @property
    def version(self) -> str:
        """The name of the version, `name@digest`."""
        return f"{self.name}@{hashlib.sha256(self.canonical_json()).hexdigest()[:DIGEST_LENGTH]}"
