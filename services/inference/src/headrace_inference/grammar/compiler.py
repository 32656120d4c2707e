"""Compilation of grammars to guides, in separate threads, within bounds and with a cache.

Tenants take turns. Requests of a tenant with an equal grammar share one compilation. A grammar that is not in the cache
is compiled on trial first (`trial`).
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

from headrace_inference import metrics
from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.grammar.fair_slots import FairSlots
from headrace_inference.grammar.forms import AnswerForm, check_schemas, grammar_of
from headrace_inference.grammar.vocabulary import read_vocabulary
from headrace_runtime.errors import Refused
from headrace_runtime.grammars.trial import GrammarTrial, TrialFailed, TrialTimedOut
from headrace_runtime.grammars.vocabulary import (
    LIBRARY,
    GrammarGuide,
    LibraryVocabulary,
    VocabularyUnreadable,
    library_version,
    match_grammar,
)
from headrace_runtime.process.event_loop import WorkerThreads
from headrace_runtime.storage.tenant_memory import TenantMemory
from headrace_schemas import TokenGrammar
from headrace_schemas.http.answer_form import RESPONSE_FORMAT

_DEPTH_MAX = 48
"""Deepest nesting of a JSON Schema. References (`$ref`) are not followed."""
BYTES_MAX = 65_536
"""Largest grammar of a request as text: its JSON Schema, or those of the tools that it may call."""
COMPILE_TIMEOUT_S = 5.0
"""Seconds that the compilation of a new grammar may take: first on trial, in a process that is killed when it takes
longer, then in the replica."""
_THREADS = 1
"""Threads that compile grammars outside the event loop."""
WAITING_MAX = 32
"""Grammars that may wait for a thread, shared equally by the tenants that wait; further requests get the error
`overloaded`."""
_CACHED_MAX = 256
"""Compiled grammars in the cache. Beyond it the tenant with the most loses the one that it has not used for
longest."""

_TOKENIZERS_MAX = 8
_REASON_LENGTH_MAX = 300
_POLL_S = 0.05
_QUOTED_GRAMMAR = re.compile(r"\n[^\S\n]++\d++ \| ")
"""Start of the numbered lines in which the library's errors quote the grammar."""


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """The grammar of one request, with a guide for each of its choices."""

    record: TokenGrammar
    """The grammar with all that its masks depend on, as turns record it."""
    guides: tuple[GrammarGuide, ...]
    """One guide for each choice, which has accepted the choice's resumed tokens."""


@dataclass(frozen=True, slots=True)
class _Grammar:
    """The grammar of one request as text, and everything that compiling it needs."""

    text: str
    trial_text: str
    """The grammar with tags as text, because a trial has no tokens."""
    tokenizer: ChatTokenizer
    vocabulary: int
    """Number of token ids of the model."""
    library: LibraryVocabulary
    field: str
    """Field of the request that errors name."""

    @property
    def key(self) -> tuple[bytes, int, str]:
        return self.tokenizer.digest, self.vocabulary, self.text

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens of the model that end an answer."""
        return frozenset(token for token in self.tokenizer.stop_ids if token < self.vocabulary)

    @property
    def record(self) -> TokenGrammar:
        """The grammar as turns record it."""
        return TokenGrammar(
            text=self.text,
            library=LIBRARY,
            library_version=library_version(),
            tokenizer_sha256=self.library.digest,
            vocabulary=self.vocabulary,
            end_id=self.library.end_id,
            stop_ids=tuple(sorted(self.stop_ids)),
        )


@dataclass(slots=True)
class _Compilation:
    """One compilation of a grammar for a tenant. `begun_s` is the monotonic time when its trial ended; 0 before."""

    grammar: _Grammar
    tenant: str
    begun_s: float = field(default=0.0)


class GrammarCompiler:
    """Compiler and cache of grammars, shared by all requests of a replica. The owner must close it."""

    def __init__(self, parsers: Parsers) -> None:
        self._parsers = parsers
        self._texts = WorkerThreads(_THREADS, inline_bytes=0)
        """Writes grammars and copies guides, for the tenants in turn: a large schema takes 0.1 s."""
        self._pool = ThreadPoolExecutor(_THREADS, "grammar")
        self._slots: FairSlots[str] = FairSlots(_THREADS, WAITING_MAX)
        self._compilations: dict[tuple[str, tuple[bytes, int, str]], asyncio.Task[GrammarGuide]] = {}
        """Compilations that wait or run, by tenant and grammar. Requests with an equal grammar share one."""
        self._trials = threading.local()
        self._lock = threading.Lock()
        self._guides: TenantMemory[tuple[bytes, int, str], GrammarGuide] = TenantMemory(_CACHED_MAX)
        """Each tenant has its own, so that none displaces those of others, or learns from the time what they use."""
        self._tokenizers: OrderedDict[tuple[bytes, int], LibraryVocabulary] = OrderedDict()

    def close(self) -> None:
        """Cancel the compilations that wait. Those that have begun finish."""
        self._texts.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def compile(
        self,
        form: AnswerForm,
        tokenizer: ChatTokenizer,
        vocabulary: int,
        resumed: Sequence[Sequence[int]],
        *,
        opened: bool,
        tenant: str = "",
    ) -> CompiledGrammar:
        """Compile the grammar of an answer form, or return it from the cache. It does not block the event loop.

        Args:
            form: the form that the answers must have.
            tokenizer: the version's tokenizer.
            vocabulary: number of token ids of the model.
            resumed: for each choice, the tokens that another replica sampled.
            opened: whether the prompt ends inside reasoning.
            tenant: owner of the request. Owners take turns to compile.

        Raises:
            Refused: the form cannot be compiled, or is beyond the bounds of this module.
            Overloaded: too many grammars of the tenant wait.
        """
        write = partial(self._write, form, tokenizer, vocabulary, opened)
        grammar = await self._texts.run(BYTES_MAX, write, tenant)
        guide = self._recall(tenant, grammar.key)
        metrics.GRAMMARS.labels("compiled" if guide is None else "cached").inc()
        if guide is None:
            guide = await asyncio.shield(self._compilation(grammar, tenant))
        guides = await self._texts.run(BYTES_MAX, partial(_copies, guide, resumed), tenant)
        return CompiledGrammar(grammar.record, guides)

    def _compilation(self, grammar: _Grammar, tenant: str) -> asyncio.Task[GrammarGuide]:
        """Return the task that compiles a grammar for a tenant, which all requests of the tenant share; start it if
        there is none.
        """
        name = tenant, grammar.key
        if name not in self._compilations:
            task = self._compilations[name] = asyncio.create_task(self._compile_in_turn(grammar, tenant))
            task.add_done_callback(lambda _task: self._compilations.pop(name))
            task.add_done_callback(_retrieve_error)
        return self._compilations[name]

    async def _compile_in_turn(self, grammar: _Grammar, tenant: str) -> GrammarGuide:
        await self._slots.acquire(tenant)
        work = _Compilation(grammar, tenant)
        future = asyncio.get_running_loop().run_in_executor(self._pool, self._compile, work)
        future.add_done_callback(self._done)
        while not future.done():
            await asyncio.wait((future,), timeout=_POLL_S)
            if not future.done() and work.begun_s and time.monotonic() - work.begun_s > self._limit_s:
                raise self._too_slow(grammar.field)
        return future.result()

    def check(self, tokenizer: ChatTokenizer, vocabulary: int) -> str:
        """Return why answers of a version cannot be constrained; empty if they can. Blocks for up to a second."""
        try:
            if tokenizer.eos_id is None or tokenizer.eos_id >= vocabulary:
                return "the tokenizer names no token that ends an answer"
            self._library_vocabulary(tokenizer, vocabulary, tokenizer.eos_id, RESPONSE_FORMAT)
        except Refused as error:
            return str(error)
        return ""

    @property
    def _limit_s(self) -> float:
        return COMPILE_TIMEOUT_S

    def _too_slow(self, field: str) -> Refused:
        message = f"the schema takes longer than {self._limit_s:g} s to compile"
        return Refused(400, "schema_too_large", message, field)

    def _done(self, future: asyncio.Future[GrammarGuide]) -> None:
        self._slots.release()
        _retrieve_error(future)

    # In a thread

    def _write(self, form: AnswerForm, tokenizer: ChatTokenizer, vocabulary: int, opened: bool) -> _Grammar:
        """Return the grammar of an answer form as text. Raises `Refused`."""
        check_schemas(form, _DEPTH_MAX)
        field, end_id = _field(form), tokenizer.eos_id
        if end_id is None or end_id >= vocabulary:
            message = f"{field}: the model has no token that ends an answer, so answers cannot be constrained"
            raise Refused(400, "unsupported_value", message, field)
        library = self._library_vocabulary(tokenizer, vocabulary, end_id, field)

        def special(text: str) -> int | None:
            token = tokenizer.token_id(text)
            if token is None or token >= vocabulary or not library.words.is_special_token(token):
                return None
            return token

        opening = self._parsers.reasoning.opening
        thinks = bool(opening) and opening in tokenizer.template
        text, trial_text = (
            grammar_of(form, self._parsers, tokens, thinks=thinks, opened=opened) for tokens in (special, _no_tokens)
        )
        if len(text.encode()) > BYTES_MAX:
            limit = f"{BYTES_MAX} bytes"
            raise Refused(400, "schema_too_large", f"{field}: its grammar is larger than {limit}", field)
        return _Grammar(text, trial_text, tokenizer, vocabulary, library, field)

    def _compile(self, work: _Compilation) -> GrammarGuide:
        """Compile a grammar and store its guide in the cache.

        A child process compiles the grammar first, because only a process can be stopped when a grammar takes too long
        or needs too much memory. Raises `Refused` if either compilation fails.
        """
        self._try(work.grammar)
        work.begun_s = time.monotonic()
        guide = self._guide(work.grammar)
        with self._lock:
            self._guides.set(work.tenant, work.grammar.key, guide)
        return guide

    def _try(self, grammar: _Grammar) -> None:
        trial: GrammarTrial | None = getattr(self._trials, "trial", None)
        if trial is None:
            trial = self._trials.trial = GrammarTrial()
        try:
            trial.run(grammar.trial_text, self._limit_s)
        except TrialTimedOut:
            raise self._too_slow(grammar.field) from None
        except TrialFailed:
            message = f"{grammar.field}: the schema cannot be compiled within 2 GiB; make it smaller"
            raise Refused(400, "schema_too_large", message, grammar.field) from None

    def _guide(self, grammar: _Grammar) -> GrammarGuide:
        words = grammar.library.words
        matcher = match_grammar(words, grammar.text)
        if matcher.is_error():
            raise _unservable(matcher.get_error(), grammar.field)
        guide = GrammarGuide(matcher, words.vocab_size, grammar.library.end_id, grammar.stop_ids)
        first = guide.fresh()
        first.allowed()
        if first.error:
            raise _unservable(first.error, grammar.field)
        return guide

    def _library_vocabulary(
        self, tokenizer: ChatTokenizer, vocabulary: int, end_id: int, field: str
    ) -> LibraryVocabulary:
        """Return the grammar library's form of the tokenizer. The first call takes up to a second."""
        key = (tokenizer.digest, vocabulary)
        with self._lock:
            library = self._tokenizers.get(key)
        if library is None:
            try:
                library = read_vocabulary(tokenizer, vocabulary, end_id)
            except VocabularyUnreadable as error:
                reason = str(error)[:_REASON_LENGTH_MAX]
                message = f"{field}: the tokenizer of this model cannot be used with grammars: {reason}"
                raise Refused(400, "unsupported_value", message, field) from error
            with self._lock:
                self._tokenizers[key] = library
                while len(self._tokenizers) > _TOKENIZERS_MAX:
                    self._tokenizers.popitem(last=False)
        return library

    def _recall(self, tenant: str, key: tuple[bytes, int, str]) -> GrammarGuide | None:
        with self._lock:
            return self._guides.get(tenant, key)


def _retrieve_error(future: asyncio.Future[GrammarGuide]) -> None:
    """Retrieve the error of a compilation whose requests may all have been cancelled."""
    if not future.cancelled():
        future.exception()


def _no_tokens(_text: str) -> None:
    return None


def _copies(guide: GrammarGuide, resumed: Sequence[Sequence[int]]) -> tuple[GrammarGuide, ...]:
    return tuple(_resumed(guide, tokens) for tokens in resumed)


def _resumed(guide: GrammarGuide, tokens: Sequence[int]) -> GrammarGuide:
    """Return a copy of the guide advanced by `tokens`. Raises `Refused` if the grammar does not allow these tokens."""
    resumed = guide.fresh()
    if not resumed.replay(tokens):
        message = "headrace_resume: contains tokens that the grammar of this request does not allow"
        raise Refused(400, "invalid_value", message, "headrace_resume")
    return resumed


def _field(form: AnswerForm) -> str:
    return "tools" if form.forced else "response_format"


def _unservable(error: str, field: str) -> Refused:
    """Return the refusal of a request whose schema cannot be enforced.

    Args:
        error: message of the grammar library. The grammar that it quotes is left out.
        field: field of the request that contains the schema.
    """
    reason = _QUOTED_GRAMMAR.split(error)[0].rpartition("failed to compile JSON schema: ")[2]
    message = f"{field}: the schema cannot be enforced: {' '.join(reason.split())[:_REASON_LENGTH_MAX]}"
    return Refused(400, "unsupported_schema", message, field)
