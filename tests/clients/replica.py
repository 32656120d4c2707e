"""A replica whose model plays any tool loop, and the account of a client: the runs of its captured turns.

If the system prompt asks for it (`SPOKEN`), there is a sentence before each call.

Its HTTP interface, chat template, tokenizer, parsers and grammars are those of `headrace_inference`. Only the model is
scripted, and its answers must be ones that the grammar of their request allows.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from headrace_collector.closing import build_trajectory
from headrace_collector.facts import TurnContent, turn_facts
from headrace_collector.retries import superseded_turns
from headrace_collector.runs import partition_runs
from headrace_inference.chat.exact import ExactPrompts
from headrace_inference.chat.parsers import Parsers
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.chat.tool_calls import CLOSE, HERMES, OPEN
from headrace_inference.engine import NOBODY, Sampling, Share, Start
from headrace_inference.grammar.compiler import GrammarCompiler
from headrace_inference.http.completions import Completions
from headrace_inference.http.wire import parse
from headrace_runtime.errors import Refused
from headrace_runtime.process.event_loop import WorkerThreads
from headrace_runtime.storage import versions
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Trajectory, Turn
from headrace_schemas.values.base import utcnow
from headrace_trainer.experiences.restrictions import SetBuilder
from tests.support import tiny_model
from tests.support.fake_replica import VERSION, Called, FakeReplica
from tests.unit.inference.conftest import ScriptedEngine, ScriptedGeneration

CALLS = 2
_WORD = re.compile(r"WORD-\w+")
_TOOLS = ("search", "mail-search", "Read", "exec_command", "shell", "read", "read_file", "bash", "run_shell_command")
"""Tools that the model calls, the first one that is on offer."""
_ANSWER: ContextVar[str] = ContextVar("answer")
"""Text of the answer to the request that is being served."""
SPOKEN = "Say what you do."
VOCABULARY = 320
"""Number of token ids of the model."""
Json = dict[str, Any]


class AgentReplica(FakeReplica):
    """Serves an agent of any framework without a script of its own. `base` is the folder of its model."""

    def __init__(self, folder: Path) -> None:
        super().__init__(grammars=("response_format", "tool_choice"))
        self.base = tiny_model.build(folder / "base", vocabulary=VOCABULARY)
        blobs = BlobStore((folder / "versions").as_uri())
        manifest = versions.read_manifest(blobs, tiny_model.publish(blobs, self.base).manifest)
        parsers = Parsers(HERMES)
        self._tokenizer = ChatTokenizer(self.base, manifest)
        self._engine = AgentEngine(self._tokenizer)
        self._completions = Completions(
            self._engine,
            ExactPrompts(4_000_000, parsers),
            parsers,
            WorkerThreads(1, 1 << 30),
            GrammarCompiler(parsers),
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw)
        answer = answer_to(body, "note.txt")
        _ANSWER.set(answer if isinstance(answer, str) else _call_text(answer, body))
        try:
            chat = parse(raw, choices_max=4, values_max=1_000_000)
            completion = await self._completions.begin(chat, VERSION, self._tokenizer, len(raw))
        except Refused as error:
            body = {"error": {"message": str(error), "code": error.code, "param": error.param}}
            return web.json_response(body, status=error.status)
        try:
            if not chat.stream:
                return web.Response(body=await completion.complete(), content_type="application/json")
            response = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await response.prepare(request)
            async for event in completion.stream(include_usage=True):
                await response.write(event)
            return response
        finally:
            completion.close()


class AgentEngine(ScriptedEngine):
    """Each choice generates `_ANSWER`, which the guide of the choice must allow."""

    reports_sets = True

    def tokens_of(self, choice: int) -> list[int]:
        assert self._tokenizer.eos_id is not None
        return [*self._tokenizer.encode(_ANSWER.get()), self._tokenizer.eos_id]

    def generate(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        version: str,
        starts: Sequence[Start],
        *,
        stream: bool,
        share: Share = NOBODY,
    ) -> ScriptedGeneration:
        for start in starts:
            guide = start.guide
            for token in self.tokens_of(start.choice) if guide else ():
                assert guide
                guide.accept(token)
            if guide and guide.error:
                raise Refused(500, "script", f"the grammar does not allow the scripted answer {_ANSWER.get()}")
        return super().generate(prompt, sampling, version, starts, stream=stream, share=share)


def _call_text(call: Called, body: Json) -> str:
    text = "I look." if SPOKEN in _text(body["messages"][0]) else ""
    return f"{text}{OPEN}{json.dumps({'name': call.name, 'arguments': call.arguments}, ensure_ascii=False)}{CLOSE}"


def answer_to(body: Json, file: str) -> str | Called:
    """Return the answer of the model to a request, from its tools and its conversation alone."""
    texts = [_text(message) for message in body["messages"]]
    words = _WORD.findall("\n".join(texts))
    final = f"The word is {words[0] if words else 'unknown'}."
    tools: dict[str, Json] = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
    name = next((name for name in _TOOLS if name in tools), None)
    forced = body.get("tool_choice")
    if isinstance(forced, dict):
        name = forced["function"]["name"]
        return Called(name, _arguments(tools[name], file, final))
    result_count = _results_since_the_question(body["messages"])
    if "[[ ## next_tool_name ## ]]" in texts[0]:
        return _dspy_step(texts[-1])
    if "[[ ## answer ## ]]" in texts[0]:
        return f"[[ ## reasoning ## ]]\nI read it.\n\n[[ ## answer ## ]]\n{final}\n\n[[ ## completed ## ]]"
    if "</code>" in texts[0]:
        code = 'print(search("the invoice"))' if result_count < CALLS else f"final_answer({final!r})"
        return f"I act.\n<code>\n{code}\n</code>"
    if name is not None and result_count < CALLS:
        return Called(name, _arguments(tools[name], file, final))
    typed = next((name for name, tool in tools.items() if "answer" in _properties(tool)), None)
    if typed is not None:
        return Called(typed, _arguments(tools[typed], file, final))
    if "response_format" in body:
        return json.dumps(_filled(body["response_format"].get("json_schema", {}).get("schema", {}), final))
    return final


def _results_since_the_question(messages: list[Json]) -> int:
    """Count the results of tools after the last question; results and reminders may be a user's messages themselves."""
    results = 0
    for message in reversed(messages):
        is_result = message["role"] == "tool" or "Observation:" in _text(message)
        if message["role"] == "user" and not is_result and _WORD.search(_text(message)):
            break
        results += is_result
    return results


def _dspy_step(text: str) -> str:
    step = text.count("[[ ## observation_") or len(set(re.findall(r"observation_(\d+)", text)))
    name, arguments = ("search", '{"query": "the invoice"}') if step < CALLS else ("finish", "{}")
    fields = {"next_thought": "I go on.", "next_tool_name": name, "next_tool_args": arguments}
    return "\n\n".join(
        itertools.chain((f"[[ ## {key} ## ]]\n{value}" for key, value in fields.items()), ["[[ ## completed ## ]]"])
    )


def _properties(tool: Json) -> Json:
    return dict((tool.get("parameters") or {}).get("properties", {}))


def _arguments(tool: Json, file: str, final: str) -> Json:
    return {} if not tool.get("parameters") else _filled(tool["parameters"], final, file)


def _filled(schema: Json, final: str, file: str = "note.txt") -> Any:
    """Return a value of a JSON Schema, with required properties only."""
    properties = schema.get("properties", {})
    values: Json = {}
    required: Any = schema.get("required", properties)
    for name in properties:  # in the order of a grammar
        if name not in required:
            continue
        kind = properties.get(name, {}).get("type", "string")
        if name in ("file_path", "filePath", "path", "absolute_path"):
            values[name] = file
        elif name in ("cmd", "command"):
            values[name] = ["cat", file] if kind == "array" else f"cat {file}"
        elif kind == "string":
            values[name] = "the invoice" if name == "query" else final
        else:
            values[name] = {"integer": 1, "number": 1, "boolean": False, "array": [], "object": {}}.get(
                str(kind), final
            )
    return values


def _text(message: Json) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)


@dataclass(frozen=True)
class ClientAccount:
    """Figures of the turns of one client."""

    calls: int
    sessions: int
    runs: int
    """Trajectories of its task, without side calls."""
    side_calls: int
    branches: int
    trained: int
    """Turns whose sampling distribution the trainer computes again, which every algorithm can train."""
    left_out: dict[str, int]
    """The other turns, by reason."""


def trajectories_of(turns: Sequence[Turn]) -> list[Trajectory]:
    """Return the trajectories of turns in the order of their capture, as the collector builds them."""
    sessions: dict[str, list[Turn]] = defaultdict(list)
    for turn in turns:
        sessions[turn.session_key].append(turn)
    return [trajectory for members in sessions.values() for trajectory in _of_session(members)]


def _of_session(turns: Sequence[Turn]) -> list[Trajectory]:
    now = utcnow()
    by_id = {turn.turn_id: turn for turn in turns}
    facts = [turn_facts(turn, now, offset) for offset, turn in enumerate(turns)]
    partition = partition_runs(facts, [])
    if partition.ties:
        partition = partition_runs(facts, [], {name: TurnContent.of(by_id[name]) for name in partition.ties})
    superseded = superseded_turns(facts)
    return [
        build_trajectory(
            [by_id[turn.turn_id] for turn in run.turns],
            superseded=superseded,
            about_run=(),
            about_session=(),
            reason="idle",
            models=run.models,
            is_side_call=run.is_side_call,
            turns_from=run.log_offset,
            now=now,
        )
        for run in partition.runs
    ]


def account_of(turns: Sequence[Turn], sets: SetBuilder) -> ClientAccount:
    """Return the account of all turns that a client made. `sets` computes the tokens that answers were sampled from."""
    trajectories = trajectories_of(turns)
    tasks = [trajectory for trajectory in trajectories if trajectory.untrained is None]
    reason_of: dict[str, str | None] = {}
    for trajectory in trajectories:
        if trajectory.untrained is not None:
            reason_of |= dict.fromkeys(trajectory.turn_ids, trajectory.untrained)
            continue
        reason_of |= {item.turn_id: item.full_reason for item in trajectory.left_out}
        for branch in trajectory.branches:
            problem = None if branch.sampled is None else sets.problem(branch.sampled)
            reason_of |= {span.turn_id: span.no_logprobs or problem for span in branch.spans}
    reasons = Counter(reason for reason in reason_of.values() if reason is not None)
    return ClientAccount(
        calls=len(turns),
        sessions=len({turn.session_key for turn in turns}),
        runs=len(tasks),
        side_calls=reasons["side_call"],
        branches=sum(len(trajectory.branches) for trajectory in tasks),
        trained=sum(reason is None for reason in reason_of.values()),
        left_out=dict(reasons),
    )
