"""The inference engine `parrot`, which answers every request with one sentence, and parsers of tool calls and of
reasoning.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from headrace_inference.chat.parsers import Call, ParsedText, ReasoningParser, ToolParser
from headrace_inference.engine import NOBODY, EngineKind, Finish, Sampling, Share, Start, Tokens
from headrace_inference.errors import UnknownVersion
from headrace_runtime.settings.sections import Section
from headrace_schemas import Probe
from headrace_schemas.values.blobs import Manifest

_CALL = re.compile(r"\[\[(\w+) (\{.*?\})\]\]", re.DOTALL)


class ParrotSettings(Section):
    """Settings in the section `[inference.parrot]`."""

    says: str = "hello"
    """Sentence that answers every request."""


class Parrot:
    """Engine that answers every request with one sentence (`headrace_inference.engine.Engine`)."""

    name = "parrot"
    capacity = 8
    resumes = True
    grammars = False
    reports_sets = False
    alive = True

    def __init__(self, settings: ParrotSettings) -> None:
        self._says = settings.says
        self._tokenizers: dict[str, Tokenizer] = {}
        self._open: list[tuple[str, Speech]] = []

    async def load(self, folder: Path, manifest: Manifest) -> None:
        self._tokenizers[manifest.version] = Tokenizer.from_file(str(folder / "tokenizer.json"))

    async def unload(self, version: str) -> None:
        self._tokenizers.pop(version, None)

    async def probe(self, version: str) -> Probe:
        return Probe(max_abs_delta=0.0, passed=version in self._tokenizers)

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        version: str,
        starts: Sequence[Start],
        *,
        stream: bool,
        share: Share = NOBODY,
    ) -> Speech:
        if version not in self._tokenizers:
            raise UnknownVersion(version)
        words = self._tokenizers[version].encode(self._says, add_special_tokens=False).ids
        end = sorted(sampling.stop_ids)[:1]
        speech = Speech([*words, *end], -math.log(self.vocabulary(version)), sampling, starts)
        self._open = [one for one in self._open if not one[1].ended.is_set()] + [(version, speech)]
        return speech

    def in_flight(self, version: str | None = None) -> int:
        return sum(not speech.ended.is_set() for held, speech in self._open if version in (None, held))

    async def drained(self, version: str | None = None) -> None:
        await asyncio.gather(*(speech.ended.wait() for held, speech in self._open if version in (None, held)))

    def context_tokens(self, version: str) -> int:
        return 2048

    def vocabulary(self, version: str) -> int:
        return self._tokenizers[version].get_vocab_size()

    def check(self) -> None:
        """Report no problem: this engine has no state that could break."""

    async def stop(self) -> None:
        self._tokenizers.clear()


class Speech:
    """One answer of the engine (`Generation`)."""

    def __init__(self, script: list[int], logprob: float, sampling: Sampling, starts: Sequence[Start]) -> None:
        self._script = script
        self._logprob = logprob
        self._sampling = sampling
        self._starts = starts
        self.ended = asyncio.Event()

    def close(self) -> None:
        self.ended.set()

    def __aiter__(self) -> AsyncIterator[Tokens]:
        return self._say()

    async def _say(self) -> AsyncIterator[Tokens]:
        for start in self._starts:
            tokens, finish = self._said(start)
            yield Tokens(start.choice, tokens, [self._logprob] * len(tokens), finish=finish)
        self.ended.set()

    def _said(self, start: Start) -> tuple[list[int], Finish]:
        found: list[int] = []
        for token in self._script[len(start.resumed) :]:
            found.append(token)
            if token in self._sampling.stop_ids or (start.until is not None and start.until(token)):
                return found, "stop"
            if self._sampling.max_tokens == len(start.resumed) + len(found):
                break
        return found, "length"


PARROT = EngineKind(Parrot, ParrotSettings)


class Brackets:
    """Parser of tool calls; it buffers all text from the first bracket on."""

    def __init__(self) -> None:
        self._buffer = ""

    def feed(self, text: str) -> ParsedText:
        self._buffer += text
        parsed = ParsedText()
        while match := _CALL.search(self._buffer):
            parsed.content += self._buffer[: match.start()]
            self._buffer = self._buffer[match.end() :]
            try:
                json.loads(match[2])
                parsed.calls.append(Call(match[1], match[2]))
            except ValueError:
                parsed.content += match[0]
        start = self._buffer.find("[")
        ready = len(self._buffer) if start < 0 else start
        parsed.content += self._buffer[:ready]
        self._buffer = self._buffer[ready:]
        return parsed

    def end(self) -> ParsedText:
        text, self._buffer = self._buffer, ""
        return ParsedText(text)


class Hmm:
    """Parser of reasoning; it buffers text until the first line is complete."""

    def __init__(self) -> None:
        self._buffer = ""
        self._over = False

    def feed(self, text: str) -> tuple[str, str]:
        if self._over:
            return "", text
        self._buffer += text
        if not "hmm".startswith(self._buffer[:3]):
            return "", self._rest()
        line, end, rest = self._buffer.partition("\n")
        if not end:
            return "", ""
        self._buffer = rest
        return line, self._rest()

    def end(self) -> tuple[str, str]:
        return "", self._rest()

    def _rest(self) -> str:
        self._over = True
        rest, self._buffer = self._buffer, ""
        return rest


BRACKETS = ToolParser(Brackets, ("[[", "]]"))
HMM = ReasoningParser(lambda _opened: Hmm())
