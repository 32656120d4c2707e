"""Attacks of one tenant on a whole stack, in sequence, while another tenant works on it.

The other tenant calls the model, gives feedback and ends its sessions all the time. Its calls during an attack are
compared with those before and after it. `tests.attack.neighbour_load` contains the attacks;
`NEIGHBOURS="bodies tokens"` in the environment selects these two.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from headrace.topics import Range, connected
from headrace_schemas import Experience
from tests.attack import neighbour_rewards
from tests.attack.neighbour_load import GARBLE, KINDS, TENANT
from tests.attack.program import attack
from tests.attack.stacks import MODEL, Serving, beside, block_s, serving
from tests.support import fake_llm, tiny_model
from tests.support.fake_llm import Call, FakeLLM, Reply
from tests.support.processes import wait_until
from tests.support.service_process import ServiceProcess
from tests.system.program import Line, at_most, none_of

RATIO_MAX = 2.0
BLOCK_S_MAX = 0.1
CALLS = 200
"""Calls of the other tenant under each attack, and in quiet periods around it."""
_ATTEMPTS = 3
"""Number of attempts. An attack that slows another tenant or blocks a loop does so every time; a busy machine now and
then.
"""
_START_S = 300.0
_SETTLE_S = 3.0
_QUIET_S_MAX = 60.0
_REWARD_S_MAX = 240.0
_LOOK_S = 4.0
_INNOCENT = "alice"
_SERVICES = ("collector", "scorer", "judge")
_SOURCES = frozenset({"feedback", "function:strange", "judge:helpfulness"})
"""Sources of the rewards that each session of the other tenant must get."""
_VERDICT = json.dumps({"reason": "because", "criteria": {"outcome": 4, "grounding": 4, "conduct": 5, "clarity": 5}})
_NO_VERDICTS: tuple[bytes, ...] = (
    json.dumps(fake_llm.completion(_VERDICT.replace("because", "bad \\ud83d end"))).encode(),
    json.dumps(fake_llm.completion(_VERDICT.replace("because", "a\n\n\x00b"))).encode(),
    json.dumps(fake_llm.completion("{" * 100_000)).encode(),
    json.dumps(fake_llm.completion(_VERDICT.replace("4", "1" + "0" * 5000))).encode(),
    b'{"choices":[{"message":{"content":"bad \\ud83d end"}}]}',
    b"[" * 500_000,
    b"\xff\xfe\x00garbage",
    b"null",
)


@dataclass
class Innocent:
    """The other tenant, who attacks nobody: durations of its calls, and its failures."""

    calls: list[tuple[float, float]] = field(default_factory=list)
    """Start time and duration in seconds of each call."""
    requests: int = 0
    failures: list[str] = field(default_factory=list)
    sessions: list[str] = field(default_factory=list)
    """The sessions without an empty answer, from which the judge would abstain."""

    def seconds(self, *spans: tuple[float, float]) -> list[float]:
        """Return the durations of calls that began within one of the spans."""
        return [took_s for began_s, took_s in self.calls if any(start <= began_s < end for start, end in spans)]

    async def work(self, url: str) -> None:
        """Make two calls, give feedback and end the session, again and again until cancelled."""
        headers = {"authorization": f"Bearer {_INNOCENT}"}
        async with aiohttp.ClientSession(url, headers=headers) as http:
            for number in range(10**9):
                session = f"alice-{number}"
                body = {"model": MODEL, "messages": [{"role": "user", "content": f"Hello {number}"}], "max_tokens": 8}
                responses, texts = [], []
                for _ in range(2):
                    began_s = time.monotonic()
                    answer = await self._post(http, "/v1/chat/completions", body, {"x-session-id": session})
                    self.calls.append((began_s, time.monotonic() - began_s))
                    responses.append(answer.get("id"))
                    texts += [choice["message"]["content"] or "" for choice in answer.get("choices", ())]
                    await asyncio.sleep(0.02)
                judged = await self._post(http, "/v1/feedback", {"msg_ids": responses, "value": number % 2})
                ended = await self._post(http, f"/v1/sessions/{session}/end", {})
                if judged and ended and all(text.strip() for text in texts):
                    self.sessions.append(session)

    async def _post(
        self, http: aiohttp.ClientSession, path: str, body: object, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        self.requests += 1
        try:
            async with http.post(path, json=body, headers=headers) as answer:
                if answer.status in (200, 202):
                    parsed: dict[str, Any] = await answer.json()
                    return parsed
                self.failures.append(f"{path}: {answer.status} {(await answer.text())[:300]}")
        except (aiohttp.ClientError, TimeoutError) as error:
            self.failures.append(f"{path}: {error!r}")
        return {}


@dataclass(frozen=True)
class Stack:
    """A running stack with the other tenant at work."""

    running: Serving
    services: list[ServiceProcess]
    innocent: Innocent

    def blocks(self) -> dict[str, float]:
        """Return the longest block of each process's event loop in the last few seconds."""
        urls = {service.name: service.url for service in self.services}
        served = {"gateway": self.running.gateway.url, "replica": self.running.replica.url}
        return block_s(served | urls | {"broker": self.running.broker_url}, "busy")

    def ended(self) -> list[str]:
        """Return the services that have ended or report that they are unhealthy."""
        return [service.name for service in self.services if not service.running() or not service.healthy()]


@dataclass
class Measured:
    """Result of one attack: durations of the other tenant's calls during the attack and without it, and the longest
    blocks.
    """

    beside_s: list[float]
    quiet_s: list[float]
    blocks: dict[str, float]
    answers: dict[str, int]
    failures: int
    requests: int
    ended: list[str]

    @property
    def ratio(self) -> float:
        return _p99(self.beside_s) / _p99(self.quiet_s)

    @property
    def holds(self) -> bool:
        return self.ratio <= RATIO_MAX and max(self.blocks.values()) <= BLOCK_S_MAX


@attack("another tenant keeps its pace beside each attack, and no loop is blocked", timeout_s=3600.0)
async def neighbours(folder: Path, rng: random.Random) -> list[Line]:
    lines: list[Line] = []
    async with _stack(folder) as stack:
        async with beside(stack.innocent.work(stack.running.gateway.url)):
            await _quiet(stack)
            for kind in os.environ.get("NEIGHBOURS", " ".join(KINDS)).split():
                tries: list[Measured] = []
                while not tries or (not tries[-1].holds and len(tries) < _ATTEMPTS):
                    tries.append(await _measure(stack, kind, rng))
                    _tell(kind, tries[-1])
                lines += _lines(kind, tries)
        unrewarded, waited_s = await _unrewarded(stack)
    print("".join(f"    {text}\n" for text in stack.innocent.failures[:5]), end="", flush=True)
    sources = ", ".join(sorted(_SOURCES))
    name = f"the other tenant's sessions that lack a reward of {sources} after {waited_s:.0f} s"
    return [*lines, none_of(name, len(unrewarded), len(stack.innocent.sessions))]


def _lines(kind: str, tries: list[Measured]) -> list[Line]:
    words = KINDS[kind][0]
    ratio = min(measured.ratio for measured in tries)
    longest = {name: min(measured.blocks[name] for measured in tries) for name in tries[0].blocks}
    longest_blocks = ", ".join(f"{name} {1000 * longest[name]:.0f}" for name in longest)
    ended = sorted({name for measured in tries for name in measured.ended})
    return [
        at_most(f"{words}: the other tenant's p99 grows", round(ratio, 2), RATIO_MAX, "x"),
        at_most(
            f"{words}: longest block of a loop ({longest_blocks} ms)",
            round(1000 * max(longest.values()), 1),
            1000 * BLOCK_S_MAX,
            " ms",
        ),
        none_of(
            f"{words}: the other tenant's requests that failed",
            sum(measured.failures for measured in tries),
            sum(measured.requests for measured in tries),
        ),
        none_of(f"{words}: services that ended or paused ({' '.join(ended)})", len(ended), len(_SERVICES)),
    ]


async def _measure(stack: Stack, kind: str, rng: random.Random) -> Measured:
    """Play one attack between two quiet periods. The other tenant makes the same number of calls in each."""
    innocent = stack.innocent
    before = await _calls(stack, CALLS // 2)
    failures, requests = len(innocent.failures), innocent.requests
    blocks: dict[str, float] = defaultdict(float)
    async with _load(stack.running, kind, rng) as answers:
        await asyncio.sleep(_SETTLE_S)
        beside = await _calls(stack, CALLS, blocks)
    await asyncio.sleep(_SETTLE_S)
    ended = await asyncio.to_thread(stack.ended)
    await _quiet(stack, blocks)
    after = await _calls(stack, CALLS // 2, blocks)
    return Measured(
        beside_s=innocent.seconds(beside),
        quiet_s=innocent.seconds(before, after),
        blocks=dict(blocks),
        answers=answers,
        failures=len(innocent.failures) - failures,
        requests=innocent.requests - requests,
        ended=ended,
    )


async def _calls(stack: Stack, count: int, blocks: dict[str, float] | None = None) -> tuple[float, float]:
    """Wait for `count` calls of the other tenant and collect loop blocks in `blocks`. Return the start and end time."""
    start_s, target = time.monotonic(), len(stack.innocent.calls) + count
    looked_s = start_s
    while len(stack.innocent.calls) < target:
        await asyncio.sleep(0.05)
        if blocks is not None and time.monotonic() - looked_s > _LOOK_S:
            await _note(stack, blocks)
            looked_s = time.monotonic()
    return start_s, time.monotonic()


async def _note(stack: Stack, blocks: dict[str, float]) -> None:
    for name, longest_s in (await asyncio.to_thread(stack.blocks)).items():
        blocks[name] = max(blocks[name], longest_s)


async def _quiet(stack: Stack, blocks: dict[str, float] | None = None) -> None:
    """Wait until the gauges no longer include earlier blocks. Meanwhile collect loop blocks in `blocks`."""
    deadline_s = time.monotonic() + _QUIET_S_MAX
    while time.monotonic() < deadline_s:
        longest: dict[str, float] = defaultdict(float)
        await _note(stack, longest)
        for name, longest_s in longest.items():
            if blocks is not None:
                blocks[name] = max(blocks[name], longest_s)
        if max(longest.values()) < BLOCK_S_MAX / 2:
            return
        await asyncio.sleep(1)


def _tell(kind: str, measured: Measured) -> None:
    """Print the figures of one attempt."""
    beside, quiet = measured.beside_s, measured.quiet_s
    blocks = " ".join(f"{name} {_ms(longest_s)}" for name, longest_s in measured.blocks.items())
    print(
        f"    {kind}: p99 {_ms(_p99(quiet))} to {_ms(_p99(beside))} ms ({measured.ratio:.2f}x), median "
        f"{_ms(statistics.median(quiet))} to {_ms(statistics.median(beside))} ms; loops {blocks} ms; "
        f"{measured.failures} of {measured.requests} failed; answers {measured.answers}",
        flush=True,
    )


@contextlib.asynccontextmanager
async def _stack(folder: Path) -> AsyncIterator[Stack]:
    with FakeLLM(_judge_answer) as llm:
        settings: dict[str, dict[str, object]] = {
            "collector": {},
            "scorer": {
                "SCORER__FUNCTIONS": [f"{neighbour_rewards.__name__}:strange", "answer_format"],
                "SCORER__EXPECTED": ["judge:helpfulness"],
            },
            "judge": {"JUDGE__ENDPOINT__BASE_URL": llm.base_url, "JUDGE__ENDPOINT__MODEL": "judge-1"},
        }
        tenants, scopes = (TENANT, _INNOCENT), ("chat", "feedback", "admin")
        async with serving(folder, tenants, scopes=scopes, build=_with_tokens_without_row) as running:
            environ = {"PYTHONPATH": str(Path.cwd())}
            services = [
                ServiceProcess(name, folder / "data", running.bus, environ, **settings[name]) for name in _SERVICES
            ]
            try:
                for service in services:
                    service.begin()
                for service in services:
                    await asyncio.to_thread(wait_until, service.healthy, _START_S, f"{service.name} is healthy")
                yield Stack(running, services, Innocent())
            finally:
                for service in services:
                    await asyncio.to_thread(service.stop)


def _with_tokens_without_row(folder: Path) -> Path:
    """Build a tiny model whose tokenizer has 64 tokens more than its embedding has rows."""
    from transformers import AutoTokenizer

    tiny_model.build(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra_{number}>" for number in range(64)])
    tokenizer.save_pretrained(folder)
    return folder


def _judge_answer(call: Call) -> Reply:
    """Return the judge's answer to `call`: an invalid one if the conversation is the attacker's."""
    if GARBLE not in call.prompt:
        return Reply(fake_llm.completion(_VERDICT))
    return Reply(raw=_NO_VERDICTS[hash(call.prompt) % len(_NO_VERDICTS)])


@contextlib.asynccontextmanager
async def _load(running: Serving, kind: str, rng: random.Random) -> AsyncIterator[dict[str, int]]:
    """Run an attack of this kind during the block. Yield the counts of the answers to it, which are filled in at the
    end.
    """
    arguments = (running.gateway.url, running.bus, running.version, kind)
    command = (sys.executable, "-m", "tests.attack.neighbour_load", *arguments, str(rng.randrange(2**32)))
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    answers: dict[str, int] = {}
    try:
        yield answers
        assert process.returncode is None, "the attack ended early"
        process.terminate()
        async with asyncio.timeout(60):
            printed, _ = await process.communicate()
        answers.update(json.loads(printed))
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _unrewarded(stack: Stack) -> tuple[set[str], float]:
    """Wait until each session of the other tenant has all of its rewards, or the time is over.

    Returns:
        The sessions that lack a reward, and the seconds of the wait.
    """
    began_s = time.monotonic()
    while True:
        rewarded: set[str] = set()
        async with connected(stack.running.bus) as topics:
            async for entry in topics.read(Range(Experience.topic)):
                event = entry.event
                if isinstance(event, Experience) and {part.source for part in event.parts} >= _SOURCES:
                    rewarded.add(event.session_id)
        missing = set(stack.innocent.sessions) - rewarded
        waited_s = time.monotonic() - began_s
        if not missing or waited_s > _REWARD_S_MAX:
            return missing, waited_s
        await asyncio.sleep(2)


def _p99(seconds: Iterable[float]) -> float:
    ordered = sorted(seconds)
    return ordered[max(0, round(0.99 * len(ordered)) - 1)]


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
