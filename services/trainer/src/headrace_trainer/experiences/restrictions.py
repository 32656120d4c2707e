"""Computes again from which tokens the answers of a branch were sampled: by their grammar, or from stored sets.
Penalties and biases are those of the event.

A grammar's masks depend on the library's version and the tokenizer too. If one of them differs from the replica's, or
if a sampled token is outside its recomputed set, the experience is dropped with a named detail: training it with other
sets would be biased.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from headrace_runtime.errors import HeadraceError
from headrace_runtime.grammars.guides import allows
from headrace_runtime.process import liveness
from headrace_schemas import Branch, Span, TokenGrammar
from headrace_schemas.events.allowed_tokens import check_sets, iterate_sets
from headrace_trainer.experiences.token_sets import SpanShift, TokenSet, TokenSets, set_of_bits, set_of_ids

BRANCH_BYTES_MAX = 16 << 20
"""Largest memory of the different sets of one branch."""
_CACHE_BYTES_MAX = 256 << 20
_ENTRY_BYTES = 1024
_GRAMMARS_MAX = 256
_TRIAL_TIMEOUT_S = 20.0
_SPECIAL_TOKEN = re.compile(r"<\[[^\]\n]{0,64}\]>")
"""A special token in a grammar. A trial has none, so it gets text instead."""


class SetsUnknown(HeadraceError):
    """The tokens that a branch was sampled from cannot be computed. The message is the detail of the outcome."""


@dataclass(frozen=True)
class _SpanSets:
    """The sets of a span. `large` has the size of each different large set by its digest."""

    sets: TokenSets
    large: Mapping[bytes, int]
    small_bytes: int


class SetBuilder:
    """Builds the token sets of branches for one base model. Thread-safe. Opens the tokenizer for the first grammar."""

    def __init__(self, folder: Path, vocabulary: int) -> None:
        """`folder` is that of the base model, and `vocabulary` its number of token ids."""
        self._folder = folder
        self._vocabulary = vocabulary
        self._lock = threading.RLock()
        self._spans: OrderedDict[bytes, _SpanSets | SetsUnknown] = OrderedDict()
        self._bytes = 0
        self._guides: OrderedDict[str, Any] = OrderedDict()
        self._large: OrderedDict[bytes, TokenSet] = OrderedDict()
        self._library: Any = None
        self._trial: Any = None

    def build(self, branch: Branch) -> TokenSets | None:
        """Return the sets and shifts of all spans, None where there are none. May take seconds.

        Raises:
            SetsUnknown: a grammar, a tokenizer or the stored sets do not fit.
        """
        restricted = [span for span in branch.spans if span.restricted]
        if not restricted:
            return None
        shifts = [SpanShift(span.start, span.stop, span.logit_shift) for span in restricted if span.logit_shift]
        if any(token >= self._vocabulary for each in shifts for token in each.shift.logit_bias):
            raise SetsUnknown("vocabulary")
        with_sets = [span for span in restricted if span.grammar is not None or span.stored_sets is not None]
        with self._lock:
            built = [(span.start, self._recall(branch, span)) for span in with_sets]
        large = {key: size for _, each in built for key, size in each.large.items()}
        if sum(large.values()) + sum(each.small_bytes for _, each in built) > BRANCH_BYTES_MAX:
            raise SetsUnknown("sets_size")
        return TokenSets.join(((start, each.sets) for start, each in built), shifts)

    def problem(self, branch: Branch) -> str | None:
        """Return the detail of the outcome of a branch whose sets are unknown, or None."""
        try:
            self.build(branch)
        except SetsUnknown as error:
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
            except SetsUnknown as error:
                if str(error) == "tokenizer":  # its files may be there next time
                    raise
                sets = error
            self._remember(key, sets)
        if isinstance(sets, SetsUnknown):
            raise sets
        return sets

    def _remember(self, key: bytes, sets: _SpanSets | SetsUnknown) -> None:
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
            raise SetsUnknown("stored_sets") from None
        sets = list(iterate_sets(stored))
        if max(map(max, sets)) >= self._vocabulary:
            raise SetsUnknown("vocabulary")
        return self._share(enumerate(set_of_ids(ids, self._vocabulary) for ids in sets))

    def _from_grammar(self, grammar: TokenGrammar, token_ids: Sequence[int]) -> _SpanSets:
        guide = self._guide(grammar).fresh()

        def restrictions() -> Iterator[tuple[int, TokenSet]]:
            for position, token in enumerate(token_ids):
                liveness.progress()
                words = guide.allowed()
                if guide.error or token >= self._vocabulary or not allows(words, token):
                    raise SetsUnknown("grammar")
                allowed = set_of_bits(words, self._vocabulary)
                if allowed is not None:
                    yield position, allowed
                guide.accept(token)

        return self._share(restrictions())

    def _share(self, restrictions: Iterable[tuple[int, TokenSet]]) -> _SpanSets:
        """Return the sets of the positions of a span, with one array for equal large sets of all spans.

        The result does not depend on other spans, and neither does its size.
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
                raise SetsUnknown("sets_size")
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
        from headrace_runtime.grammars import guides, vocabulary

        guide = self._guides.get(grammar.digest)
        if guide is not None:
            self._guides.move_to_end(grammar.digest)
            return guide
        if (grammar.library, grammar.library_version) != (vocabulary.LIBRARY, vocabulary.library_version()):
            raise SetsUnknown("grammar_library")
        if grammar.vocabulary != self._vocabulary:
            raise SetsUnknown("vocabulary")
        library = self._open_library(grammar.end_id)
        if grammar.tokenizer_sha256 != library.digest:
            raise SetsUnknown("tokenizer")
        self._try(grammar.text)
        matcher = guides.match_grammar(library.words, grammar.text)
        if matcher.is_error():
            raise SetsUnknown("grammar")
        guide = guides.GrammarGuide(matcher, library.words.vocab_size, grammar.end_id, frozenset(grammar.stop_ids))
        self._guides[grammar.digest] = guide
        while len(self._guides) > _GRAMMARS_MAX:
            self._guides.popitem(last=False)
        return guide

    def _try(self, text: str) -> None:
        """Compile a grammar in a separate process first, because experiences may come from any producer."""
        from headrace_runtime.grammars.trial import GrammarTrial, TrialFailed

        self._trial = self._trial or GrammarTrial()
        try:
            self._trial.run(_SPECIAL_TOKEN.sub('"x"', text), _TRIAL_TIMEOUT_S)
        except TrialFailed:
            raise SetsUnknown("grammar") from None

    def _open_library(self, end_id: int) -> Any:
        """Return the base's vocabulary as replicas read it: through transformers, which may add tokens."""
        from transformers import AutoTokenizer

        from headrace_runtime.grammars import vocabulary

        if self._library is None or self._library.end_id != end_id:
            try:
                outer: Any = AutoTokenizer.from_pretrained(self._folder, local_files_only=True, trust_remote_code=False)
                self._library = vocabulary.library_vocabulary(outer.backend_tokenizer, self._vocabulary, end_id)
            except (OSError, ValueError, KeyError, AttributeError, HeadraceError):
                raise SetsUnknown("tokenizer") from None
        return self._library


def _size(sets: _SpanSets | SetsUnknown) -> int:
    """Return the approximate memory of an entry of the cache."""
    arrays = 0 if isinstance(sets, SetsUnknown) else sets.small_bytes + sum(sets.large.values())
    return _ENTRY_BYTES + arrays
