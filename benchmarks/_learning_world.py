"""The demo in one process: its agent plays on the real engine, and its episodes become experiences as in the services.

What is real: prompts, sampling and answers (`headrace_inference`), branches (`headrace_collector`), the demo's reward
functions under the scorer's policy (`headrace_scorer`), tasks and agent (`examples/email_agent`). What is left out:
HTTP, the bus and the databases between them.
"""

from __future__ import annotations

import asyncio
import json
import tomllib
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, TypeVar, cast

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion

from email_agent import mailbox, rewards
from email_agent.react import play
from email_agent.tasks import Split, Task, stream, tasks
from email_agent.tools import Mailtools
from headrace_cli.controls.statistics import Score
from headrace_collector.trajectories import trajectory
from headrace_inference.chat.exact import ExactPrompts
from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.tool_calls import HERMES
from headrace_inference.grammar.compiler import GrammarCompiler
from headrace_inference.grammar.settings import GrammarSettings
from headrace_inference.http.completions import Completions
from headrace_inference.http.request import ChatRequest
from headrace_inference.settings import TorchSettings
from headrace_inference.torch_engine.engine import TorchEngine
from headrace_runtime.aside import Aside
from headrace_runtime.blobs import BlobStore
from headrace_runtime.versions import VersionCache
from headrace_schemas import Choice, Experience, Feedback, Message, Sampling, Trajectory, Turn, Usage
from headrace_schemas.base import utcnow
from headrace_schemas.blobs import BlobRef
from headrace_schemas.gate import Tasks
from headrace_schemas.ids import response_id, session_key
from headrace_scorer.reward_policy import RewardPolicy, SourceReward
from headrace_scorer.scores import experience

SETTINGS = tomllib.loads(Path("examples/email_agent/headrace.toml").read_text(encoding="utf-8"))
MODEL = str(SETTINGS["trainer"]["model"])
PLAYERS = 64
"""Episodes at a time: those of a step, so that the engine decodes them together."""
MAX_TOKENS = 64
PLAYS_SEED = 1_000_000
"""Where the seeds of measured plays begin: others than those of the gate."""
FUNCTIONS = {f"function:{name}": getattr(rewards, name) for name in ("answer", "evidence", "tool_use")}
POLICY = RewardPolicy(SETTINGS["scorer"]["weights"], SETTINGS["scorer"]["required"])

T = TypeVar("T")


class World:
    """The mailbox of one seed, and an engine. `open` makes one."""

    def __init__(self, seed: int, blobs: BlobStore, folder: Path, engine: TorchEngine) -> None:
        self._box = mailbox.generate(seed)
        self.tools = Mailtools(self._box.open())
        self._asked = stream(self._box, "train", seed)
        self._audit = stream(self._box, "audit", seed)
        self._audited: list[Task] = []
        self._cache = VersionCache(blobs, folder)
        self._engine = engine
        parsers = Parsers(HERMES)
        self._completions = Completions(
            engine,
            ExactPrompts(1_000_000, parsers),
            parsers,
            Aside(1, 1 << 30),
            GrammarCompiler(parsers, GrammarSettings()),
        )
        self._tokenizers: dict[str, ChatTokenizer] = {}
        self.tasks = Tasks(gate=self._names("gate"), audit=self._names("audit"))
        """What the gate's program would name; with `play` this is a `Court`."""

    @classmethod
    @asynccontextmanager
    async def open(cls, seed: int, blobs: BlobStore, folder: Path) -> AsyncIterator[Self]:
        engine = TorchEngine(TorchSettings(device="cpu", threads=1))
        try:
            yield cls(seed, blobs, folder, engine)
        finally:
            await engine.stop()

    async def load(self, ref: BlobRef) -> str:
        """A version of the trainer, ready to play."""
        manifest, folder = await self._cache.fetch(ref)
        if manifest.version not in self._tokenizers:
            await self._engine.load(folder, manifest)
            self._tokenizers[manifest.version] = ChatTokenizer(folder, manifest)
        return manifest.version

    async def unload(self, version: str) -> None:
        await self._engine.unload(version)
        del self._tokenizers[version]

    async def collect(self, version: str, episodes: int) -> list[Experience]:
        """What so many questions of the agent's own traffic come to, in the order in which they were asked."""

        async def one(task: Task) -> Sequence[Turn]:
            turns, _ = await self._episode(version, task, None)
            return turns

        found = await self.attend(episodes, one)
        return [made for task, turns in found for made in experiences_of(task, turns)]

    async def attend(self, episodes: int, visit: Callable[[Task], Awaitable[T]]) -> list[tuple[Task, T]]:
        """What comes of the next questions of the agent's own traffic, in the order in which they were asked."""
        asked = [next(self._asked) for _ in range(episodes)]
        room = asyncio.Semaphore(PLAYERS)

        async def one(task: Task) -> tuple[Task, T]:
            async with room:
                return task, await visit(task)

        return list(await asyncio.gather(*map(one, asked)))

    async def score(self, version: str, plays: int) -> list[Score]:
        """Plays of audit tasks, the same for every version."""
        while len(self._audited) < plays:
            self._audited.append(next(self._audit))
        room = asyncio.Semaphore(PLAYERS)

        async def one(number: int, task: Task) -> Score:
            async with room:
                return task.id, await self._play(version, task, PLAYS_SEED + number)

        return list(await asyncio.gather(*(one(*pair) for pair in enumerate(self._audited[:plays]))))

    def client(self, version: str) -> Client:
        """For one session with a loaded version."""
        return Client(self._completions, self._tokenizers[version], version)

    async def play(self, version: str, task: str, seed: int) -> float:
        return await self._play(version, self._known[task], seed)

    async def _play(self, version: str, task: Task, seed: int) -> float:
        _, answer = await self._episode(version, task, seed)
        return float(answer is not None and rewards.same_answer(answer, task.expected))

    async def _episode(self, version: str, task: Task, seed: int | None) -> tuple[list[Turn], str | None]:
        client = self.client(version)
        episode = await play(cast(AsyncOpenAI, client), version, self.tools, task.question, MAX_TOKENS, seed)
        return client.turns, episode.answer

    def _names(self, split: Split) -> tuple[str, ...]:
        return tuple(task.id for task in tasks(self._box, split))

    @cached_property
    def _known(self) -> dict[str, Task]:
        return {task.id: task for split in ("gate", "audit") for task in tasks(self._box, split)}


class Client:
    """As much of `AsyncOpenAI` as the agent uses; keeps what the gateway would capture."""

    def __init__(self, completions: Completions, tokenizer: ChatTokenizer, version: str) -> None:
        self._completions, self._tokenizer, self._version = completions, tokenizer, version
        self._session = uuid.uuid4().hex
        self.turns: list[Turn] = []
        self.chat = SimpleNamespace(completions=self)

    async def create(self, *, seed: object, **body: Any) -> ChatCompletion:
        body |= {"return_token_ids": True, "logprobs": True}
        if isinstance(seed, int):
            body["seed"] = seed
        request = ChatRequest.model_validate_json(json.dumps(body))
        began = utcnow()
        completion = await self._completions.begin(request, self._version, self._tokenizer)
        try:
            answered = json.loads(await completion.whole())
        finally:
            completion.close()
        key = session_key("default", self._session)
        (choice,) = answered["choices"]
        turn = Turn(
            time=utcnow(),
            turn_id=response_id(key),
            session_key=key,
            session_id=self._session,
            session_source="header",
            model=MODEL,
            version=answered["model"],
            replica_id="in-process",
            request_digest="0" * 64,
            messages=request.messages,
            tools=request.offered_tools,
            sampling=Sampling(temperature=body["temperature"], max_tokens=body["max_tokens"]),
            prompt_token_ids=answered["prompt_token_ids"],
            choices=(
                Choice(
                    index=0,
                    token_ids=choice["token_ids"],
                    logprobs=[one["logprob"] for one in choice["logprobs"]["content"]],
                    finish_reason=choice["finish_reason"],
                    message=Message.model_validate(choice["message"]),
                ),
            ),
            usage=Usage(
                prompt_tokens=answered["usage"]["prompt_tokens"],
                completion_tokens=answered["usage"]["completion_tokens"],
            ),
            started_at=began,
        )
        self.turns.append(turn)
        choice["logprobs"] = None
        return ChatCompletion.model_validate({**answered, "id": turn.turn_id})


def experiences_of(task: Task, turns: Sequence[Turn]) -> list[Experience]:
    """As collector and scorer make them of an episode and its feedback."""
    told = Feedback(
        time=utcnow(),
        feedback_id=uuid.uuid4().hex,
        session_key=turns[0].session_key,
        msg_ids=tuple(turn.turn_id for turn in turns),
        task_id=task.kind,
        context={"expected": task.expected},
    )
    run = trajectory(
        turns, given_up=(), about_run=[told], about_session=[], reason="feedback", models=1, turns_from=0, now=utcnow()
    )
    rewards = [SourceReward(source, None, "scored", value) for source, value in _scored(run).items()]
    return [
        experience(
            run,
            index,
            rewards,
            {},
            POLICY,
            rewarded=False,
            now=utcnow(),
            revision=0,
            task_id=run.task_id,
            run_id=run.run_id,
            parts=run.parts,
        )
        for index in range(len(run.branches))
    ]


def _scored(run: Trajectory) -> dict[str, float]:
    context = run.context
    with_context = {name: FUNCTIONS[name](run, context) for name in ("function:answer", "function:evidence")}
    return with_context | {"function:tool_use": rewards.tool_use(run)}
