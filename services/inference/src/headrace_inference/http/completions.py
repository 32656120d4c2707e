"""Chat completions, streamed or in one response: tokenizes messages, runs the engine, and formats its tokens."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from headrace_inference import metrics
from headrace_inference.chat.answer import AnswerParser, AnswerSyntax, StopWatch
from headrace_inference.chat.exact import ExactPrompts, Prompt
from headrace_inference.chat.parsers import ParserContext, Parsers
from headrace_inference.chat.tokenizer import UNLIMITED, ChatTokenizer, RenderLimits
from headrace_inference.engine import NOBODY, AnswerScorer, Engine, Finish, Generation, Sampling, Share, Start, Tokens
from headrace_inference.errors import EngineFailed, TokenOutOfVocabulary
from headrace_inference.grammar.compiler import GrammarCompiler
from headrace_inference.grammar.forms import AnswerForm
from headrace_inference.http import wire
from headrace_inference.http.wire import ChatRequest
from headrace_runtime.errors import Refused
from headrace_runtime.process.event_loop import WorkerThreads
from headrace_schemas import TokenGrammar
from headrace_schemas.events.chat import SAMPLED_TEMPERATURE_MIN
from headrace_schemas.http.answer_form import RESPONSE_FORMAT, TOOL_CHOICE
from headrace_schemas.http.replica_api import RESUME_FIELD as RESUME
from headrace_schemas.http.replica_api import ResumedChoice, TokensToScore

_LOGPROB_BYTES = 100
"""Approximate size of one token's logprob in a response."""


@dataclass(slots=True)
class _Choice:
    """Progress of one choice (one of the `n` answers) of a request that is being answered."""

    index: int
    answer: AnswerParser
    resumed: bool = False
    """Whether the client has received its beginning."""
    complete: bool = False
    """Whether the client has received its end."""
    finish: Finish | None = None


@dataclass(frozen=True, slots=True)
class _PreparedRequest:
    """A checked request in the form that the engine takes: prompt, sampling settings, and the choices to be sampled."""

    prompt: Prompt
    sampling: Sampling
    choices: list[_Choice]
    starts: list[Start]
    form: AnswerForm | None
    """Constraints of `response_format` and `tool_choice` on the answers, or None."""
    opened: bool
    """Whether the prompt ends inside reasoning."""
    grammar: TokenGrammar | None = None
    """The compiled form, if the engine samples by its guides."""


class Completions:
    """Builder of completions from chat requests, shared by all requests. Long work runs in threads."""

    def __init__(
        self,
        engine: Engine,
        prompts: ExactPrompts,
        parsers: Parsers,
        worker_threads: WorkerThreads,
        grammars: GrammarCompiler,
        limits: RenderLimits = UNLIMITED,
    ) -> None:
        self._engine = engine
        self._prompts = prompts
        self._parsers = parsers
        self._worker_threads = worker_threads
        self._grammars = grammars
        self._limits = limits

    async def begin(
        self,
        request: ChatRequest,
        version: str,
        tokenizer: ChatTokenizer,
        size_bytes: int = 0,
        share: Share = NOBODY,
    ) -> Completion:
        """Start the generation for a chat request. The caller must close the completion.

        Args:
            request: the checked request.
            version: the version that answers.
            tokenizer: the version's tokenizer.
            size_bytes: size of the request's body; a large prompt is built in a thread.
            share: key by which the engine shares its capacity fairly.

        Raises:
            Refused: the request cannot be served.
        """
        started = time.monotonic()
        prepared = await self._worker_threads.run(size_bytes, lambda: self._prepare(request, version, tokenizer))
        if prepared.form is not None:
            tenant = str(replace(share, salt=request.cache_salt or "").tenant)
            prepared = await self._add_grammar(prepared, prepared.form, version, tokenizer, tenant)
        generation = None
        if prepared.starts:
            generation = self._engine.generate(
                prepared.prompt.token_ids,
                prepared.sampling,
                version,
                prepared.starts,
                stream=bool(request.stream),
                share=replace(share, salt=request.cache_salt or ""),
            )
        grammar = prepared.grammar.model_dump(mode="json") if prepared.grammar and request.return_token_ids else None
        raw = request.headrace_prompt
        text = prepared.prompt.text if raw is not None and raw.token_ids is not None else None
        shape = wire.ResponseFormatter(
            tokenizer, version, bool(request.return_token_ids), bool(request.logprobs), grammar, text
        )
        return Completion(
            self._prompts, prepared.prompt, shape, prepared.choices, generation, started, self._worker_threads
        )

    async def score(self, version: str, answers: Sequence[TokensToScore]) -> list[list[float]]:
        """Return the logprobs of the tokens of given answers. Raises `Refused` if the engine cannot compute them."""
        engine: object = self._engine
        if not isinstance(engine, AnswerScorer):
            raise Refused(400, "unsupported", f"engine {self._engine.name} cannot compute logprobs of given tokens")
        for number, answer in enumerate(answers):
            if answer.temperature < SAMPLED_TEMPERATURE_MIN:
                field = f"answers.{number}.temperature"
                message = f"{field}: sampling below {SAMPLED_TEMPERATURE_MIN:g} is greedy; score such answers at 1"
                raise Refused(400, "invalid_value", message, field)
            for name, ids in (("prompt_token_ids", answer.prompt_token_ids), ("token_ids", answer.token_ids)):
                if any(token >= self._engine.vocabulary(version) for token in ids):
                    field = f"answers.{number}.{name}"
                    raise Refused(400, "invalid_value", f"{field}: contains ids that {version} does not have", field)
        return await engine.score(version, answers)

    async def _add_grammar(
        self, prepared: _PreparedRequest, form: AnswerForm, version: str, tokenizer: ChatTokenizer, tenant: str
    ) -> _PreparedRequest:
        """Compile the grammar of the form, and return the request with the grammar and a guide for each choice."""
        if not self._engine.grammars:
            field = TOOL_CHOICE if form.forced else RESPONSE_FORMAT
            message = f"{field}: engine {self._engine.name} cannot constrain answers"
            raise Refused(400, "unsupported_value", message, field)
        vocabulary = self._engine.vocabulary(version)
        resumed = [start.resumed for start in prepared.starts]
        grammar = await self._grammars.compile(
            form, tokenizer, vocabulary, resumed, opened=prepared.opened, tenant=tenant
        )
        starts = [replace(start, guide=guide) for start, guide in zip(prepared.starts, grammar.guides, strict=True)]
        sampling = replace(prepared.sampling, grammar=grammar.record.text)
        record = grammar.record if self._engine.reports_sets else None
        return replace(prepared, sampling=sampling, starts=starts, grammar=record)

    def _prepare(self, request: ChatRequest, version: str, tokenizer: ChatTokenizer) -> _PreparedRequest:
        """Render and tokenize the prompt, and create the choices. May be called in any thread."""
        tools = request.offered_tools
        prompt = self._prompt(request, tokenizer)
        if request.resumed_prompt is not None:  # the replica that began had the exact tokens
            self._check_ids(request.resumed_prompt, version, tokenizer, RESUME)
            prompt = replace(prompt, token_ids=list(request.resumed_prompt))
        field = "prompt" if request.headrace_prompt else "messages"
        if not prompt.token_ids:
            message = f"{field}: the prompt has no tokens; send a text that is not empty"
            raise Refused(400, "invalid_value", message, field)
        self._check_ids(prompt.token_ids, version, tokenizer, field)
        self._check_ids(tuple(request.logit_bias or ()), version, tokenizer, "logit_bias")
        stops = request.stop or ()
        context = ParserContext(tokenizer.transformers_tokenizer, tools)
        parsers = Parsers() if request.headrace_prompt else self._parsers
        syntax = AnswerSyntax.of(prompt.text, parsers, tools=bool(tools), stops=stops, context=context)
        sampling = self._sampling(request, version, tokenizer)
        choices: list[_Choice] = []
        starts: list[Start] = []
        for index in range(request.choices):
            choice = _Choice(index, AnswerParser(tokenizer, syntax))
            choices.append(choice)
            watch = StopWatch(tokenizer, stops) if stops else None
            resumed = request.resumed.get(index)
            if resumed is not None:
                self._resume(choice, resumed, watch, request, version, tokenizer)
            if choice.finish is None and not choice.complete:
                starts.append(Start(index, choice.answer.token_ids.copy(), watch))
        return _PreparedRequest(prompt, sampling, choices, starts, request.form, syntax.reasoning_opened)

    def _prompt(self, request: ChatRequest, tokenizer: ChatTokenizer) -> Prompt:
        """Return the prompt of the request: its messages as the chat template renders them, or a raw prompt."""
        salt, raw = request.cache_salt or "", request.headrace_prompt
        if raw is None:
            extra, history = request.chat_template_kwargs or {}, request.headrace_history
            limits, tools = self._limits, request.offered_tools
            return self._prompts.build(
                tokenizer, request.messages, tools, extra, salt=salt, limits=limits, history=history
            )
        if raw.token_ids is None:
            text = request.messages[0].text
            return Prompt(tokenizer.encode_raw(text, add_special_tokens=raw.add_special_tokens), text, None, salt)
        return Prompt(list(raw.token_ids), tokenizer.decode(raw.token_ids), None, salt)

    def _resume(
        self,
        choice: _Choice,
        resumed: ResumedChoice,
        watch: StopWatch | None,
        request: ChatRequest,
        version: str,
        tokenizer: ChatTokenizer,
    ) -> None:
        """Add to `choice` the tokens that the client has received already, and set its finish reason if they end it."""
        ids = resumed.token_ids
        self._check_ids(ids, version, tokenizer, RESUME)
        choice.resumed = True
        choice.complete = resumed.finish_reason is not None
        choice.answer.feed(ids)
        sampling = self._sampling(request, version, tokenizer)
        stopped = watch is not None and watch.replay(ids)
        if ids and (ids[-1] in sampling.stop_ids or stopped):
            choice.finish = "stop"
        elif sampling.max_tokens is not None and len(ids) >= sampling.max_tokens:
            choice.finish = "length"

    def _sampling(self, request: ChatRequest, version: str, tokenizer: ChatTokenizer) -> Sampling:
        vocabulary = self._engine.vocabulary(version)
        return request.sampling(frozenset(token for token in tokenizer.stop_ids if 0 <= token < vocabulary))

    def _check_ids(self, ids: Sequence[int], version: str, tokenizer: ChatTokenizer, field: str) -> None:
        """Raise `TokenOutOfVocabulary` for an id that the model does not have."""
        vocabulary = self._engine.vocabulary(version)
        if max(ids, default=0) >= vocabulary:
            outside = next(token for token in ids if token >= vocabulary)
            raise TokenOutOfVocabulary(outside, vocabulary, field, tokenizer.token(outside).text)


class Completion:
    """One chat request while it is answered. Call either `complete` or `stream`, once, and `close` in any case."""

    def __init__(
        self,
        prompts: ExactPrompts,
        prompt: Prompt,
        shape: wire.ResponseFormatter,
        choices: list[_Choice],
        generation: Generation | None,
        started: float,
        worker_threads: WorkerThreads,
    ) -> None:
        self._prompts = prompts
        self._worker_threads = worker_threads
        self._prompt = prompt
        self._wire = shape
        self._choices = choices
        self._generation = generation
        self._started = started
        self._cached = 0
        self._begun = False

    def close(self) -> None:
        """Abort the generation if it is not finished."""
        if self._generation is not None:
            self._generation.close()

    async def complete(self) -> bytes:
        """Wait for all choices, and return the response as JSON. Raises `EngineFailed`."""
        formatted: dict[int, bytes] = {}
        async for tokens in self._tokens():
            logprobs = len(tokens.token_ids) * (1 + len(tokens.top[0] if tokens.top else ()))
            formatted[tokens.choice] = await self._worker_threads.run(
                logprobs * _LOGPROB_BYTES, partial(self._format, tokens)
            )
        choices = [formatted[index] for index in sorted(formatted)]
        return self._wire.completion(self._prompt.token_ids, choices, self._usage())

    def _format(self, tokens: Tokens) -> bytes:
        """Return a finished choice as JSON. May be called in any thread."""
        assert tokens.finish is not None, "without streaming a choice arrives when it is finished"
        choice = self._choices[tokens.choice]
        choice.answer.feed(tokens.token_ids)
        choice.answer.end()
        return self._wire.choice(tokens, choice.answer.message, self._finish(choice, tokens.finish))

    async def stream(self, *, include_usage: bool) -> AsyncIterator[bytes]:
        """Yield server-sent events up to `[DONE]`. If the engine fails, the last event is an error instead."""
        for event in self._opening():
            yield event
        try:
            async for tokens in self._tokens():
                if not self._begun:
                    self._begun = True
                    metrics.TTFT_SECONDS.observe(time.monotonic() - self._started)
                yield self._advance(self._choices[tokens.choice], tokens)
        except EngineFailed as error:
            yield wire.error_event(str(error), "engine_failed")
            return
        if include_usage:
            yield self._wire.usage(self._usage())
        yield wire.DONE

    def _opening(self) -> list[bytes]:
        """Return the first events of a stream: the prompt, the openings of new choices, and the ends of resumed choices
        that the client has not received.
        """
        prompt_ids = self._prompt.token_ids
        new = [choice.index for choice in self._choices if not choice.resumed]
        events = [self._wire.opening(index, prompt_ids, first=index == new[0]) for index in new]
        if not new:
            events.append(self._wire.prompt(prompt_ids))
        unreported = [choice for choice in self._choices if choice.finish is not None and not choice.complete]
        return events + [self._advance(choice, Tokens(choice.index, finish=choice.finish)) for choice in unreported]

    def _advance(self, choice: _Choice, tokens: Tokens) -> bytes:
        called = choice.answer.calls
        delta = choice.answer.feed(tokens.token_ids)
        reason = None
        if tokens.finish is not None:
            delta += choice.answer.end()
            reason = self._finish(choice, tokens.finish)
        return self._wire.chunk(tokens, delta, called, reason)

    def _finish(self, choice: _Choice, finish: Finish) -> str:
        choice.finish = finish
        answer = choice.answer
        self._prompts.remember(self._prompt, answer.message, answer.token_ids, stop=answer.stop)
        return "tool_calls" if finish == "stop" and choice.answer.calls else finish

    async def _tokens(self) -> AsyncIterator[Tokens]:
        if self._generation is None:
            return
        async for tokens in self._generation:
            self._cached = max(self._cached, tokens.cached_tokens)
            yield tokens

    def _usage(self) -> wire.Json:
        sampled = sum(len(choice.answer.token_ids) for choice in self._choices)
        return wire.usage(len(self._prompt.token_ids), sampled, self._cached)
