"""Sets of tokens that the answers of a branch were sampled from: computed again by their grammar, or stored ones.

The policy at such a position is softmax(logits / T) restricted to the set. The engine's logprob, the present logprob,
the reference's and the entropy are all those of the restricted distribution (docs/decisions/0023). Penalties and biases
are those of the event.

A grammar's masks depend on the library's version and the tokenizer too. If one of them differs from the replica's, or
if a sampled token is outside its recomputed set, the experience is dropped with a named detail: training it with
other sets would be biased.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace_runtime.errors import HeadraceError
from headrace_runtime.grammars.vocabulary import allows
from headrace_runtime.process import liveness
from headrace_schemas import Branch, Span, TokenGrammar
from headrace_schemas.events.chat import LogitShift
from headrace_schemas.events.turn import check_sets, iterate_sets

TokenSet = NDArray[np.int32] | NDArray[np.uint8]
"""Either ascending token ids (int32), or the bits of all tokens (uint8): token `t` is bit `t % 8` of byte `t // 8`.

Bits take less memory for more than one token in 32. Equal large sets of a process are one array.
"""


@dataclass(frozen=True)
class SpanShift:
    """Penalties and logit bias of one answer, the tokens from `start` up to `stop`."""

    start: int
    stop: int
    shift: LogitShift


@dataclass(frozen=True, eq=False)
class TokenSets:
    """Sets of allowed tokens, for the positions of a sequence that were sampled from a part of the vocabulary."""

    positions_P: NDArray[np.int32]
    """Ascending."""
    sets: tuple[TokenSet, ...]
    shifts: tuple[SpanShift, ...] = ()
    """Ascending."""

    @classmethod
    def join(cls, parts: Iterable[tuple[int, TokenSets]], shifts: Iterable[SpanShift] = ()) -> TokenSets | None:
        """Return the token sets of several spans as those of the whole sequence, or None if there is nothing to join.

        Args:
            parts: start of each span in the sequence, and the sets of the span.
            shifts: penalties and logit bias of the answers, at positions of the sequence.
        """
        parts, shifts = list(parts), tuple(shifts)
        positions = [sets.positions_P + start for start, sets in parts]
        joined = tuple(each for _, sets in parts for each in sets.sets)
        return cls(_join(positions), joined, shifts) if joined or shifts else None

    def between(self, start: int, stop: int) -> TokenSets | None:
        """Return the sets and shifts of the positions from `start` up to `stop`, or None if there are none.

        The positions still count from the beginning of the sequence.
        """
        first, last = np.searchsorted(self.positions_P, (start, stop))
        shifts = tuple(each for each in self.shifts if start <= each.start and each.stop <= stop)
        return (
            TokenSets(self.positions_P[first:last], self.sets[first:last], shifts) if first < last or shifts else None
        )

    def digest(self) -> bytes:
        """Return the SHA-256 of the token sets of all positions and the logit shifts of all spans."""
        digest = hashlib.sha256(self.positions_P.astype("<i4").tobytes())
        digest_of: dict[int, bytes] = {}
        for each in self.sets:
            if id(each) not in digest_of:
                digest_of[id(each)] = hashlib.sha256(each.dtype.str.encode() + each.tobytes()).digest()
            digest.update(digest_of[id(each)])
        for shift in self.shifts:
            digest.update(f"{shift.start} {shift.stop} {shift.shift.model_dump_json()}".encode())
        return digest.digest()


def _join(positions: Sequence[NDArray[np.int32]]) -> NDArray[np.int32]:
    return np.concatenate(positions).astype(np.int32) if positions else np.zeros(0, np.int32)


def set_of_ids(ids: Sequence[int], vocabulary: int) -> TokenSet:
    """Return a set of token ids in the form that needs less memory: ascending ids, or one bit per vocabulary entry."""
    array = np.array(sorted(ids), np.int32)
    if len(array) * 32 <= vocabulary:
        return array
    bits = np.zeros((vocabulary + 7) // 8 * 8, np.bool_)
    bits[array] = True
    return np.packbits(bits, bitorder="little")


def set_of_bits(words: NDArray[np.int32], vocabulary: int) -> TokenSet | None:
    """Convert the bit mask of allowed tokens that a grammar returns to a set of token ids; None if all are allowed.

    Args:
        words: the mask, token `t` being bit `t % 32` of word `t // 32`.
        vocabulary: number of token ids.
    """
    octets = words.astype("<i4", copy=False).view(np.uint8)[: (vocabulary + 7) // 8].copy()
    if vocabulary % 8:
        octets[-1] &= (1 << vocabulary % 8) - 1
    count = int(np.bitwise_count(octets).sum())
    if count == vocabulary:
        return None
    if count * 32 > vocabulary:
        return octets
    occupied = np.flatnonzero(octets)
    bits = np.unpackbits(octets[occupied], bitorder="little").reshape(-1, 8)
    rows, columns = np.nonzero(bits)
    return (occupied[rows] * 8 + columns).astype(np.int32)


BRANCH_BYTES_MAX = 16 << 20
"""Largest memory of the different sets of one branch."""
_CACHE_BYTES_MAX = 256 << 20
_ENTRY_BYTES = 1024
_GRAMMARS_MAX = 256
_TRIAL_TIMEOUT_S = 20.0
_SPECIAL_TOKEN = re.compile(r"<\[[^\]\n]{0,64}\]>")
"""A special token in a grammar. A trial has none, so it gets text instead."""


class TokenSetsError(HeadraceError):
    """Error: the sets of tokens that a branch was sampled from cannot be computed.

    Its message is a short reason, which becomes `TrainingOutcome.detail`.
    """


@dataclass(frozen=True)
class _SpanSets:
    """Token sets of one span. `large` has the size in bytes of each distinct large set, by its digest."""

    sets: TokenSets
    large: Mapping[bytes, int]
    small_bytes: int


class SetBuilder:
    """Thread-safe builder of the token sets of branches, for one base model. It opens the tokenizer when needed."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """Create a builder.

        Args:
            folder: folder of the base model.
            vocabulary: its number of token ids.
        """
        self._folder = folder
        self._vocabulary = vocabulary
        self._lock = threading.RLock()
        self._spans: OrderedDict[bytes, _SpanSets | TokenSetsError] = OrderedDict()
        self._bytes = 0
        self._guides: OrderedDict[str, Any] = OrderedDict()
        self._large: OrderedDict[bytes, TokenSet] = OrderedDict()
        self._library: Any = None
        self._trial: Any = None

    def build(self, branch: Branch) -> TokenSets | None:
        """Return the tokens that could be sampled at each position of a branch, with the penalties and biases.

        It may take seconds.

        Returns:
            The sets of tokens that a grammar or a truncation left, and the penalties and biases, of all sampled spans;
            None if the model's own distribution was sampled everywhere.

        Raises:
            TokenSetsError: a grammar, a tokenizer or the stored sets contradict the branch.
        """
        restricted = [span for span in branch.spans if span.restricted]
        if not restricted:
            return None
        shifts = [SpanShift(span.start, span.stop, span.logit_shift) for span in restricted if span.logit_shift]
        if any(token >= self._vocabulary for each in shifts for token in each.shift.logit_bias):
            raise TokenSetsError("vocabulary")
        with_sets = [span for span in restricted if span.grammar is not None or span.stored_sets is not None]
        with self._lock:
            built = [(span.start, self._recall(branch, span)) for span in with_sets]
        large = {key: size for _, each in built for key, size in each.large.items()}
        if sum(large.values()) + sum(each.small_bytes for _, each in built) > BRANCH_BYTES_MAX:
            raise TokenSetsError("sets_size")
        return TokenSets.join(((start, each.sets) for start, each in built), shifts)

    def problem(self, branch: Branch) -> str | None:
        """Return the reason why it cannot be computed which tokens were allowed at the restricted positions of a
        branch; None if it can.
        """
        try:
            self.build(branch)
        except TokenSetsError as error:
            return str(error)
        return None

    def _recall(self, branch: Branch, span: Span) -> _SpanSets:
        token_ids = branch.token_ids[span.start : span.stop]
        grammar = None if span.grammar is None else branch.grammars[span.grammar]
        source = span.stored_sets if grammar is None else grammar.digest
        key = sha256(repr((source, token_ids)).encode()).digest()
        sets = self._spans.get(key)
        if sets is None:
            try:
                sets = self._from_stored(span, token_ids) if grammar is None else self._from_grammar(grammar, token_ids)
            except TokenSetsError as error:
                if str(error) == "tokenizer":  # its files may be there next time
                    raise
                sets = error
            self._remember(key, sets)
        if isinstance(sets, TokenSetsError):
            raise sets
        return sets

    def _remember(self, key: bytes, sets: _SpanSets | TokenSetsError) -> None:
        self._spans[key] = sets
        self._bytes += _size(sets)
        while self._bytes > _CACHE_BYTES_MAX and len(self._spans) > 1:
            _, oldest = self._spans.popitem(last=False)
            self._bytes -= _size(oldest)

    def _from_stored(self, span: Span, token_ids: Sequence[int]) -> _SpanSets:
        stored = span.stored_sets or ()
        try:
            check_sets(stored, token_ids)
        except ValueError:
            raise TokenSetsError("stored_sets") from None
        sets = list(iterate_sets(stored))
        if max(map(max, sets)) >= self._vocabulary:
            raise TokenSetsError("vocabulary")
        return self._share(enumerate(set_of_ids(ids, self._vocabulary) for ids in sets))

    def _from_grammar(self, grammar: TokenGrammar, token_ids: Sequence[int]) -> _SpanSets:
        guide = self._guide(grammar).fresh()

        def restrictions() -> Iterator[tuple[int, TokenSet]]:
            for position, token in enumerate(token_ids):
                liveness.progress()
                words = guide.allowed()
                if guide.error or token >= self._vocabulary or not allows(words, token):
                    raise TokenSetsError("grammar")
                allowed = set_of_bits(words, self._vocabulary)
                if allowed is not None:
                    yield position, allowed
                guide.accept(token)

        return self._share(restrictions())

    def _share(self, restrictions: Iterable[tuple[int, TokenSet]]) -> _SpanSets:
        """Return the token sets of a span, in which equal large sets share one array, also with those of other spans.

        The counted size does not depend on this sharing with other spans.
        """
        positions: list[int] = []
        sets: list[TokenSet] = []
        large: dict[bytes, int] = {}
        small_bytes = large_bytes = 0
        for position, each in restrictions:
            if each.dtype == np.uint8:
                key = sha256(each.tobytes()).digest()
                each = self._intern(key, each)
                large_bytes += 0 if key in large else each.nbytes
                large[key] = each.nbytes
            else:
                small_bytes += each.nbytes
            if large_bytes + small_bytes > BRANCH_BYTES_MAX:
                raise TokenSetsError("sets_size")
            positions.append(position)
            sets.append(each)
        return _SpanSets(TokenSets(np.array(positions, np.int32), tuple(sets)), large, small_bytes)

    def _intern(self, key: bytes, each: TokenSet) -> TokenSet:
        shared = self._large.setdefault(key, each)
        self._large.move_to_end(key)
        while len(self._large) * each.nbytes > _CACHE_BYTES_MAX:
            self._large.popitem(last=False)
        return shared

    def _guide(self, grammar: TokenGrammar) -> Any:
        from headrace_runtime.grammars import vocabulary
        from headrace_runtime.grammars.vocabulary import GrammarGuide, match_grammar

        guide = self._guides.get(grammar.digest)
        if guide is not None:
            self._guides.move_to_end(grammar.digest)
            return guide
        if (grammar.library, grammar.library_version) != (vocabulary.LIBRARY, vocabulary.library_version()):
            raise TokenSetsError("grammar_library")
        if grammar.vocabulary != self._vocabulary:
            raise TokenSetsError("vocabulary")
        library = self._open_library(grammar.end_id)
        if grammar.tokenizer_sha256 != library.digest:
            raise TokenSetsError("tokenizer")
        self._try(grammar.text)
        matcher = match_grammar(library.words, grammar.text)
        if matcher.is_error():
            raise TokenSetsError("grammar")
        guide = GrammarGuide(matcher, library.words.vocab_size, grammar.end_id, frozenset(grammar.stop_ids))
        self._guides[grammar.digest] = guide
        while len(self._guides) > _GRAMMARS_MAX:
            self._guides.popitem(last=False)
        return guide

    def _try(self, text: str) -> None:
        """Compile the grammar `text` in a separate process, because an untrusted one may crash or hang the compiler.

        Raises:
            TokenSetsError: the compilation fails or takes too long.
        """
        from headrace_runtime.grammars.trial import GrammarTrial, TrialFailed

        self._trial = self._trial or GrammarTrial()
        try:
            self._trial.run(_SPECIAL_TOKEN.sub('"x"', text), _TRIAL_TIMEOUT_S)
        except TrialFailed:
            raise TokenSetsError("grammar") from None

    def _open_library(self, end_id: int) -> Any:
        """Open the tokenizer of the base model for the grammar library, with the same vocabulary as replicas use."""
        from transformers import AutoTokenizer

        from headrace_runtime.grammars import vocabulary

        if self._library is None or self._library.end_id != end_id:
            try:
                outer: Any = AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
                self._library = vocabulary.library_vocabulary(outer.backend_tokenizer, self._vocabulary, end_id)
            except (OSError, ValueError, KeyError, AttributeError, HeadraceError):
                raise TokenSetsError("tokenizer") from None
        return self._library


def _size(sets: _SpanSets | TokenSetsError) -> int:
    """Return the approximate memory of an entry of the cache."""
    arrays = 0 if isinstance(sets, TokenSetsError) else sets.small_bytes + sum(sets.large.values())
    return _ENTRY_BYTES + arrays
