"""Clients that a rerun of a prompt needs: model calls over the gateway, where users have precedence, logprobs from
replicas, and the operator's tool program."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterable, Sequence

import httpx2
from pydantic import BaseModel, Field, JsonValue, ValidationError

from headrace_registry.rollouts.settings import ShadowSettings
from headrace_registry.shadow.rerun import ModelAnswer, RerunFailed, ScorableAnswer
from headrace_registry.versions import probe
from headrace_runtime.clock import Clock
from headrace_runtime.process.logs import get_logger
from headrace_runtime.process.parent_death import parent_bound_command
from headrace_runtime.process.programs import program_digest, program_environment
from headrace_schemas import FunctionCall, Message, Replica, Turn
from headrace_schemas.http.answer_form import repeated_request
from headrace_schemas.http.replica_api import ScoredAnswers, ScoreRequest, TokensToScore

_ANSWER_TOKENS_MAX = 1024
"""Maximum tokens of one answer. If the user's request has a smaller limit, that applies."""
_BUSY_WAIT_S = 300.0
"""Maximum seconds for which one call waits while replicas are busy with users."""
_CALL_TIMEOUT_S = 120.0
"""Maximum seconds of one model call."""

_BUSY = frozenset({429, 503})
_PAUSE_MIN_S, _PAUSE_MAX_S = 0.5, 15.0


class _Choice(BaseModel):
    message: Message


class _Usage(BaseModel):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(default=0, ge=0)


class _Response(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    usage: _Usage


class GatewayAnswers:
    """Clients for the answers of shadows (`runner.ShadowAnswers`): the gateway for model calls, and replicas for
    logprobs.

    `base_url` ends in `/v1`; `replicas` returns the replicas on the bus.
    """

    def __init__(
        self,
        base_url: str,
        settings: ShadowSettings,
        internal_key: str,
        replicas: Callable[[], Iterable[Replica]],
        clock: Clock,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._settings = settings
        self._internal_key = internal_key
        self._replicas = replicas
        self._clock = clock
        self._client: httpx2.AsyncClient | None = None
        self.tools = ToolProgram(settings)

    @contextlib.asynccontextmanager
    async def session(self, tenant: str, session_id: str, of: str) -> AsyncIterator[GatewaySession]:
        key = self._settings.keys.get(tenant)
        if key is None:
            raise RerunFailed(f"tenant {tenant} is not in shadow.tenants any more")
        headers = {"X-Headrace-Purpose": "shadow", "X-Shadow-Of": of, "X-Session-Id": session_id, **_bearer(key)}
        yield GatewaySession(self._http(), self._base_url, headers, self._settings, self._clock)
        with contextlib.suppress(httpx2.HTTPError):  # the collector closes a session that is not ended
            await self._http().post(f"{self._base_url}/sessions/{session_id}/end", headers=_bearer(key), timeout=30.0)

    async def logprobs(self, version: str, answers: Sequence[ScorableAnswer]) -> list[list[float]] | None:
        scoring_replicas = [
            item
            for item in probe.live_replicas(self._replicas(), self._clock.now())
            if item.scores and item.ready(version)
        ]
        if not scoring_replicas:
            return None
        replica = min(scoring_replicas, key=lambda item: item.in_flight / item.capacity)
        items = [
            TokensToScore(
                prompt_token_ids=item.prompt_token_ids, token_ids=item.token_ids, temperature=item.temperature
            )
            for item in answers
        ]
        body = ScoreRequest(model=version, answers=tuple(items)).model_dump_json().encode()
        headers = {"content-type": "application/json", **_bearer(self._internal_key)}
        try:
            url = f"{replica.url}/v1/logprobs"
            response = await self._http().post(url, content=body, headers=headers, timeout=_CALL_TIMEOUT_S)
            if response.status_code != 200:
                raise RerunFailed(f"replica {replica.replica_id} answered {response.status_code} for logprobs")
            scored = ScoredAnswers.model_validate_json(response.content)
        except httpx2.HTTPError as error:
            raise RerunFailed(f"replica {replica.replica_id}: {type(error).__name__}") from None
        except ValidationError:
            raise RerunFailed(f"replica {replica.replica_id} answered 200 without logprobs") from None
        if [len(item) for item in scored.logprobs] != [len(item.token_ids) for item in answers]:
            raise RerunFailed(f"replica {replica.replica_id} returned a different number of logprobs than requested")
        return [list(item) for item in scored.logprobs]

    async def stop(self) -> None:
        await self.tools.stop()
        if self._client is not None:
            await self._client.aclose()
            self._client = None

    def _http(self) -> httpx2.AsyncClient:
        """Return the HTTP client. It is created on first use, because it belongs to the event loop that uses it."""
        if self._client is None:
            self._client = httpx2.AsyncClient(timeout=None, trust_env=False)
        return self._client


class GatewaySession:
    """Model calls of one rerun, sent through the gateway (`rerun.ModelSession`)."""

    def __init__(
        self,
        client: httpx2.AsyncClient,
        base_url: str,
        headers: dict[str, str],
        settings: ShadowSettings,
        clock: Clock,
    ) -> None:
        self._client = client
        self._url = f"{base_url}/chat/completions"
        self._headers = headers
        self._settings = settings
        self._clock = clock

    async def call_model(self, version: str, prompt: Turn, messages: Sequence[Message]) -> ModelAnswer:
        """Call the model and return its answer. Wait while users need all replicas, for at most `_BUSY_WAIT_S` seconds.

        Raises:
            RerunFailed: the gateway did not answer.
        """
        body = repeated_request(version, prompt, messages, _ANSWER_TOKENS_MAX)
        headers = self._headers | ({"X-Task-Id": prompt.task_id} if prompt.task_id else {})
        waited_s, pause_s = 0.0, _PAUSE_MIN_S
        while True:
            response = await self._post(body, headers)
            if response.status_code not in _BUSY:
                return _read(response)
            if waited_s >= _BUSY_WAIT_S:
                raise RerunFailed(f"the gateway was busy with users for {_BUSY_WAIT_S:g} s")
            await self._clock.sleep(pause_s)
            waited_s += pause_s
            pause_s = min(_PAUSE_MAX_S, 2 * pause_s)

    async def _post(self, body: dict[str, JsonValue], headers: dict[str, str]) -> httpx2.Response:
        try:
            async with asyncio.timeout(_CALL_TIMEOUT_S):
                return await self._client.post(self._url, json=body, headers=headers)
        except TimeoutError:
            raise RerunFailed(f"no answer within {_CALL_TIMEOUT_S:g} s") from None
        except httpx2.HTTPError as error:
            raise RerunFailed(f"the gateway cannot be reached: {type(error).__name__}") from None


def _read(response: httpx2.Response) -> ModelAnswer:
    if response.status_code != 200:
        raise RerunFailed(f"the gateway answered {response.status_code}")
    try:
        completion = _Response.model_validate_json(response.content, extra="ignore")
    except ValidationError:
        raise RerunFailed("the gateway answered 200 without a chat completion") from None
    return ModelAnswer(
        completion.choices[0].message, completion.usage.prompt_tokens + completion.usage.completion_tokens
    )


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


TOOL_TIMEOUT_S = 30.0
"""Maximum seconds of one call of the tool program."""
TOOL_RESULT_BYTES_MAX = 262_144
"""Maximum bytes of one line that the tool program prints."""

log = get_logger(__name__)


class ToolRequest(BaseModel):
    """Input line of the tool program: a call of a tool."""

    id: int
    name: str
    arguments: str


class ToolResult(BaseModel):
    """Output line of the tool program: the result of a call."""

    id: int
    result: str


class ToolProgram:
    """Process of the operator's tool program. It is started at the first call, and again at a call after it has ended.

    The process has a process group of its own, and is killed when the registry ends.
    """

    def __init__(self, settings: ShadowSettings) -> None:
        self._settings = settings
        self._numbers = itertools.count(1)
        self._process: Process | None = None
        self._reading: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[str]] = {}
        self._starting = asyncio.Lock()

    async def call(self, function: FunctionCall) -> str:
        """Call a read-only tool, and return its result. Raises `RerunFailed`."""
        if function.name not in self._settings.read_only_tools:
            raise AssertionError(f"{function.name} is not marked read-only")
        async with self._starting:
            process = await self._running()
        request = ToolRequest(id=next(self._numbers), name=function.name, arguments=function.arguments)
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting[request.id] = answer
        try:
            assert process.stdin is not None
            process.stdin.write(request.model_dump_json().encode() + b"\n")
            async with asyncio.timeout(TOOL_TIMEOUT_S):
                await process.stdin.drain()
                return await answer
        except TimeoutError:
            raise RerunFailed(f"tool {function.name}: no result within {TOOL_TIMEOUT_S:g} s") from None
        except ConnectionError:
            raise RerunFailed(f"tool {function.name}: shadow.tools_command has ended") from None
        finally:
            self._waiting.pop(request.id, None)

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        if self._reading is not None:
            await asyncio.gather(self._reading, return_exceptions=True)

    async def _running(self) -> Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        await self.stop()
        digest = await asyncio.to_thread(program_digest, self._settings.tools_command)
        log.info("shadow_tools_begin", sha256=digest)
        command = [argument.replace("{python}", sys.executable) for argument in self._settings.tools_command]
        self._process = await asyncio.create_subprocess_exec(
            *parent_bound_command(command),
            stdin=PIPE,
            stdout=PIPE,
            stderr=DEVNULL,
            start_new_session=True,
            limit=TOOL_RESULT_BYTES_MAX,
            env=program_environment(self._settings.tools_environment),
        )
        self._reading = asyncio.create_task(self._read(self._process))
        return self._process

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        problem = "shadow.tools_command has ended"
        try:
            while line := await process.stdout.readline():
                result = ToolResult.model_validate_json(line)
                answer = self._waiting.get(result.id)
                if answer is not None and not answer.done():
                    answer.set_result(result.result)
        except ValidationError:
            problem = 'shadow.tools_command printed a line that is not {"id": ..., "result": "..."}'
        except ValueError:
            problem = f"shadow.tools_command printed a line longer than {TOOL_RESULT_BYTES_MAX} bytes"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            for answer in self._waiting.values():
                if not answer.done():
                    answer.set_exception(RerunFailed(problem))
                    answer.exception()  # a cancelled caller never retrieves it
            if self._process is process:
                self._process = None  # the next call starts another process
            await process.wait()
