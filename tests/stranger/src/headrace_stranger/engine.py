"""The inference engine `parrot`: it answers every request with one sentence, and needs neither weights nor torch."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from headrace_inference.engine import NOBODY, EngineKind, Finish, Sampling, Share, Start, Tokens
from headrace_inference.errors import UnknownVersion
from headrace_runtime.settings.sections import Section
from headrace_schemas import Probe
from headrace_schemas.values.blobs import Manifest


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
