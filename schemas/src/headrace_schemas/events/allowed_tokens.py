"""The tokens that an engine allowed at each position of an answer, as turns and branches record them.

An answer is sampled from softmax(logits / T) restricted to a set of allowed tokens. A grammar determines the sets: they
are computed again from the grammar and the sampled tokens. `top_p`, `top_k` and `min_p` determine them by the model's
logits: they are stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Annotated

from pydantic import Field

from headrace_schemas.values.arrays import TokenIds
from headrace_schemas.values.base import LongText, Model, Sha256, Text
from headrace_schemas.values.bounds import INT32

STORED_SETS_MAX = 32_768
"""Largest number of integers in the stored sets of one turn. A turn with more is served, and left out of training."""

STOP_IDS_MAX = 1024
"""Largest number of tokens that end an answer. Models with more are not loaded."""

TokenId = Annotated[int, Field(ge=0), INT32]

StoredSets = Annotated[TokenIds, Field(max_length=STORED_SETS_MAX)]
"""The allowed tokens at each position of an answer: for each sampled token the size of its set, then the set's ids."""


class TokenGrammar(Model):
    """The grammar that an engine sampled an answer with, and all else that the sets of allowed tokens depend on."""

    text: LongText
    """The grammar in the library's own language."""
    library: Text
    library_version: Text
    tokenizer_sha256: Sha256
    """Digest of the version's tokenizer file."""
    vocabulary: Annotated[int, Field(ge=1), INT32]
    """Number of token ids of the model."""
    end_id: TokenId
    """Token that ends an answer for the library."""
    stop_ids: Annotated[tuple[TokenId, ...], Field(max_length=STOP_IDS_MAX)]
    """Tokens that end an answer. All of them are allowed where `end_id` is."""

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all fields."""
        return hashlib.sha256(self.model_dump_json().encode()).hexdigest()


def iterate_sets(stored: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield the set of each position. Raises `ValueError` if the sizes do not fit the array."""
    position = 0
    while position < len(stored):
        end = position + 1 + stored[position]
        if end > len(stored):
            raise ValueError(f"stored sets: the set at {position} has {stored[position]} ids and the array ends before")
        yield stored[position + 1 : end]
        position = end


def check_sets(stored: Sequence[int], token_ids: Sequence[int]) -> None:
    """Raise `ValueError` unless there is one set per token and each set contains its token."""
    sets = list(iterate_sets(stored))
    if len(sets) != len(token_ids):
        raise ValueError(f"stored sets: {len(sets)} sets for {len(token_ids)} tokens; the numbers must be equal")
    for index, (ids, token) in enumerate(zip(sets, token_ids, strict=True)):
        if token not in ids:
            raise ValueError(f"stored sets: the set of token {index} does not contain it")
