"""Compilation of grammars to guides, in separate threads, within bounds and with a cache."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace_inference import metrics
from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.errors import Overloaded
from headrace_inference.grammar.forms import AnswerForm, check_depth, grammar_of
from headrace_inference.grammar.guides import GrammarGuide
from headrace_inference.grammar.settings import GrammarSettings
from headrace_inference.grammar.vocabulary import VocabularyUnreadable, read_vocabulary
from headrace_runtime.errors import Refused
from headrace_schemas.http.answer_form import RESPONSE_FORMAT

if TYPE_CHECKING:
    from llguidance import LLTokenizer

_TOKENIZERS_MAX = 8
_REASON_LENGTH_MAX = 300
_POLL_S = 0.05
_QUOTED_GRAMMAR = re.compile(r"\n[^\S\n]++\d++ \| ")
"""Start of the numbered lines in which the library's errors quote the grammar."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """The grammar of one request, with a guide for each of its choices."""

    text: str
    """The grammar in llguidance's dialect of Lark."""
    guides: tuple[GrammarGuide, ...]
    """One guide for each choice, which has accepted the choice's resumed tokens."""


@dataclass(slots=True)
class _Compilation:
    """One compilation. `begun_s` is 0 while it waits for a thread."""

    form: AnswerForm
    tokenizer: ChatTokenizer
    vocabulary: int
    opened: bool
    resumed: Sequence[Sequence[int]]
    begun_s: float = field(default=0.0)


class GrammarCompiler:
    """Compiler and cache of grammars, shared by all requests of a replica. The owner must close it."""

    def __init__(self, parsers: Parsers, settings: GrammarSettings) -> None:
        self._parsers = parsers
        self._settings = settings
        self._pool = ThreadPoolExecutor(settings.threads, "grammar")
        self._waiting = 0
        self._lock = threading.Lock()
        self._guides: OrderedDict[tuple[bytes, int, str], GrammarGuide] = OrderedDict()
        self._tokenizers: OrderedDict[tuple[bytes, int], LLTokenizer] = OrderedDict()

    def close(self) -> None:
        """Cancel the compilations that wait. Those that have begun finish."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def compile(
        self,
        form: AnswerForm,
        tokenizer: ChatTokenizer,
        vocabulary: int,
        resumed: Sequence[Sequence[int]],
        *,
        opened: bool,
    ) -> CompiledGrammar:
        """Compile the grammar of an answer form, or take it from the cache. Does not block the event loop.

        Args:
            vocabulary: number of token ids of the model.
            resumed: tokens that each choice has already.
            opened: whether the prompt ends inside reasoning.

        Raises:
            Refused: the form cannot be compiled, or is beyond the bounds of `GrammarSettings`.
            Overloaded: too many grammars wait.
        """
        if self._waiting >= self._settings.waiting_max:
            raise Overloaded(f"{self._waiting} grammars wait to be compiled; try again")
        work = _Compilation(form, tokenizer, vocabulary, opened, resumed)
        future = asyncio.get_running_loop().run_in_executor(self._pool, self._compile, work)
        self._waiting += 1
        future.add_done_callback(self._done)
        while not future.done():
            await asyncio.wait((future,), timeout=_POLL_S)
            if not future.done() and work.begun_s and time.monotonic() - work.begun_s > self._limit_s:
                message = (
                    f"the schema takes longer than {self._limit_s:g} s to compile (inference.grammar.compile_timeout_s)"
                )
                raise Refused(400, "schema_too_large", message, _field(form))
        return future.result()

    def check(self, tokenizer: ChatTokenizer, vocabulary: int) -> str:
        """Return why answers of a version cannot be constrained; empty if they can. Blocks for up to a second."""
        try:
            if tokenizer.eos_id is None or tokenizer.eos_id >= vocabulary:
                return "the tokenizer names no token that ends an answer"
            self._library_tokenizer(tokenizer, vocabulary, tokenizer.eos_id, RESPONSE_FORMAT)
        except Refused as error:
            return str(error)
        return ""

    @property
    def _limit_s(self) -> float:
        return self._settings.compile_timeout_s

    def _done(self, future: asyncio.Future[CompiledGrammar]) -> None:
        self._waiting -= 1
        if not future.cancelled():
            future.exception()  # retrieve the error, because the request may have been cancelled

    # In a thread

    def _compile(self, work: _Compilation) -> CompiledGrammar:
        work.begun_s = time.monotonic()
        check_depth(work.form, self._settings.depth_max)
        tokenizer = work.tokenizer
        end_id = tokenizer.eos_id
        if end_id is None or end_id >= work.vocabulary:
            message = (
                f"{_field(work.form)}: the model has no token that ends an answer, so answers cannot be constrained"
            )
            raise Refused(400, "unsupported_value", message, _field(work.form))
        words = self._library_tokenizer(tokenizer, work.vocabulary, end_id, _field(work.form))

        def special(text: str) -> int | None:
            token = tokenizer.token_id(text)
            if token is None or token >= work.vocabulary or not words.is_special_token(token):
                return None
            return token

        opening = self._parsers.reasoning.opening
        thinks = bool(opening) and opening in tokenizer.template
        text = grammar_of(work.form, self._parsers, special, thinks=thinks, opened=work.opened)
        if len(text.encode()) > self._settings.bytes_max:
            limit = f"{self._settings.bytes_max} bytes (inference.grammar.bytes_max)"
            message = f"{_field(work.form)}: its grammar is larger than {limit}"
            raise Refused(400, "schema_too_large", message, _field(work.form))
        key = (tokenizer.digest, work.vocabulary, text)
        guide = self._recall(key)
        metrics.GRAMMARS.labels("compiled" if guide is None else "cached").inc()
        if guide is None:
            guide = self._guide(text, words, work, end_id)
            self._remember(key, guide)
        return CompiledGrammar(text, tuple(_resumed(guide, tokens) for tokens in work.resumed))

    def _guide(self, text: str, words: LLTokenizer, work: _Compilation, end_id: int) -> GrammarGuide:
        from llguidance import LLMatcher, LLParserLimits

        matcher = LLMatcher(words, text, log_level=0, limits=LLParserLimits(verbose_errors=False))
        if matcher.is_error():
            raise _unservable(matcher.get_error(), _field(work.form))
        stop_ids = frozenset(token for token in work.tokenizer.stop_ids if token < work.vocabulary)
        guide = GrammarGuide(matcher, words.vocab_size, end_id, stop_ids)
        first = guide.fresh()
        first.allowed()
        if first.error:
            raise _unservable(first.error, _field(work.form))
        return guide

    def _library_tokenizer(self, tokenizer: ChatTokenizer, vocabulary: int, end_id: int, field: str) -> LLTokenizer:
        """Return the grammar library's form of the tokenizer. The first call takes up to a second."""
        key = (tokenizer.digest, vocabulary)
        with self._lock:
            words = self._tokenizers.get(key)
        if words is None:
            try:
                words = read_vocabulary(tokenizer, vocabulary, end_id)
            except VocabularyUnreadable as error:
                reason = str(error)[:_REASON_LENGTH_MAX]
                message = f"{field}: the tokenizer of this model cannot be used with grammars: {reason}"
                raise Refused(400, "unsupported_value", message, field) from error
            with self._lock:
                self._tokenizers[key] = words
                while len(self._tokenizers) > _TOKENIZERS_MAX:
                    self._tokenizers.popitem(last=False)
        return words

    def _recall(self, key: tuple[bytes, int, str]) -> GrammarGuide | None:
        with self._lock:
            guide = self._guides.get(key)
            if guide is not None:
                self._guides.move_to_end(key)
            return guide

    def _remember(self, key: tuple[bytes, int, str], guide: GrammarGuide) -> None:
        with self._lock:
            self._guides[key] = guide
            while len(self._guides) > self._settings.cached:
                self._guides.popitem(last=False)


def _resumed(guide: GrammarGuide, tokens: Sequence[int]) -> GrammarGuide:
    """Return a copy of the guide that has accepted `tokens`. Raises `Refused` if the grammar does not allow them."""
    resumed = guide.fresh()
    if not resumed.replay(tokens):
        message = "headrace_resume: contains tokens that the grammar of this request does not allow"
        raise Refused(400, "invalid_value", message, "headrace_resume")
    return resumed


def _field(form: AnswerForm) -> str:
    return "tools" if form.forced else "response_format"


def _unservable(error: str, field: str) -> Refused:
    """Return the refusal of a schema, with the library's reason but without its quotation of the grammar."""
    reason = _QUOTED_GRAMMAR.split(error)[0].rpartition("failed to compile JSON schema: ")[2]
    message = f"{field}: the schema cannot be enforced: {' '.join(reason.split())[:_REASON_LENGTH_MAX]}"
    return Refused(400, "unsupported_schema", message, field)
