"""Tests of the gate: its program, its workers, and its check before training.

The program never returns a wrong score and leaves no process behind. On several workers, each play is scored once even
if workers are lost, and a failure is never a score. The check runs the gate once against a stand-in for the gateway.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from pydantic import ValidationError

from headrace_registry.check import check, run_stand_in
from headrace_registry.gate import gate as gate_module
from headrace_registry.gate.gate import Gate, GateFailed, GateSession
from headrace_registry.gate_workers.__main__ import serve
from headrace_registry.gate_workers.on_ray import GateWorker, PlayDispatcher, WorkerLost, worker_names
from headrace_registry.settings import GateRaySettings, GateSettings, RegistrySettings
from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Common
from headrace_schemas.programs import Play, Tasks
from tests.support.processes import alive, wait_until

V1, V2 = "m@0123456789ab", "m@ba9876543210"
NAMED = """
import json, sys
print(json.dumps({"gate": ["a", "b"], "audit": ["c"], "note": "extra fields are its own business"}), flush=True)
"""


def gate(code: str, *arguments: str, silence_s: float = 20.0) -> Gate:
    command = (sys.executable, "-S", "-c", code, *arguments)
    return Gate(GateSettings(command=command, base_url="http://g/v1", silence_s=silence_s))


async def score(program: Gate) -> float:
    async with program.session() as session:
        return await session.play(V1, "a", 7)


async def test_gate_session_matches_answers_in_any_order() -> None:
    code = (
        NAMED
        + """
print("playing", file=sys.stderr)
first, second = (json.loads(sys.stdin.readline()) for _ in range(2))
print(json.dumps(second | {"score": 0.25}))
print()
print(json.dumps(first | {"score": len(sys.argv[1]) / 100, "answer": "its own business"}), flush=True)
sys.stdin.read()
"""
    )
    async with gate(code, "url={base_url}").session() as session:
        assert session.tasks == Tasks(gate=("a", "b"), audit=("c",))
        assert await asyncio.gather(*(session.play(version, "a", 1) for version in (V1, V2))) == [0.15, 0.25]


async def test_gate_command_replaces_the_python_placeholder() -> None:
    code = "import json, sys; print(json.dumps({'gate': [sys.argv[1]], 'audit': ['c']}), flush=True); sys.stdin.read()"
    async with gate(code, "{python}").session() as session:
        assert session.tasks.gate == (sys.executable,)


ANSWER = NAMED + "asked = json.loads(sys.stdin.readline())\n"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('no gateway')", r"status 1: no gateway"),
        ("pass", "the program ended before naming its tasks"),
        ("print('hello')", r"line 1 .*Invalid JSON"),
        ('print(\'{"gate": ["a"]}\')', r"line 1 .*audit: Field required"),
        ('print(\'{"gate": ["a"], "audit": []}\')', r"line 1 .*audit: "),
        (NAMED + "sys.exit(3)", r"status 3: no message"),
        (NAMED, "the program ended before its standard input"),
        (ANSWER + "print(json.dumps(asked | {'score': 1.5}), flush=True)", r"line 2 .*less than or equal to 1"),
        (ANSWER + "print(json.dumps(asked | {'score': float('nan')}), flush=True)", r"line 2 "),
        (ANSWER + "print(json.dumps(asked | {'score': None}), flush=True)", r"line 2 .*score: "),
        (ANSWER + "print(json.dumps(asked), flush=True)", r"line 2 .*score: Field required"),
        (
            ANSWER + "asked['seed'] += 1; print(json.dumps(asked | {'score': 1}), flush=True)",
            "line 2 .*not requested: 'a'",
        ),
        (ANSWER + "print('x' * 5000, flush=True)", r"printed more than 2000 bytes"),
        (ANSWER + "print('{\"version', end='', flush=True)", "line 2 of its output is not"),
    ],
)
async def test_gate_failure_has_a_reason(code: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace_registry.gate.gate.OUTPUT_BYTES_MAX", 2000)
    with pytest.raises(GateFailed, match=message):
        await score(gate(code))


def gate_with_short_silence(session: GateSession) -> GateSession:
    """Shorten the silence limit after the start of the program, so that a slow start does not fail the test."""
    session._settings = session._settings.model_copy(update={"silence_s": 0.3})
    return session


async def test_gate_session_fails_after_silence_with_an_open_request() -> None:
    with pytest.raises(GateFailed, match=r"no output for gate\.silence_s = 0\.3 s while its tasks were requested"):
        await score(gate("import sys; sys.stdin.read()", silence_s=0.3))
    async with gate(ANSWER + "sys.stdin.read()").session() as session:
        with pytest.raises(GateFailed, match=r"no output for gate\.silence_s = 0\.3 s while 1 plays were requested"):
            await gate_with_short_silence(session).play(V1, "a", 1)


async def test_gate_session_may_be_silent_without_a_request() -> None:
    code = ANSWER + "print(json.dumps(asked | {'score': 1}), flush=True); sys.stdin.read()"
    async with gate(code).session() as session:
        session._last_output_s -= 1000  # so long ago it said its last word
        assert await session.play(V1, "a", 1) == 1


async def test_gate_session_plays_nothing_after_a_failure() -> None:
    async with gate(NAMED + "sys.exit('gone')").session() as session:
        for _ in range(2):
            with pytest.raises(GateFailed, match="gone"):
                await session.play(V1, "a", 1)


async def test_gate_fails_without_its_program() -> None:
    with pytest.raises(GateFailed, match="no-such-gate: No such file"):
        await score(Gate(GateSettings(command=("no-such-gate",))))


SLEEPER = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


def pids(path: Path) -> list[int]:
    return [int(text) for text in path.read_text().split()] if path.exists() else []


async def test_gate_timeout_kills_the_process_group(tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    async with gate(NAMED + SLEEPER, str(noted)).session() as session:
        await asyncio.to_thread(wait_until, lambda: len(pids(noted)) == 2, 20, "the gate's start")
        with pytest.raises(GateFailed, match=r"gate\.silence_s = 0\.3"):
            await gate_with_short_silence(session).play(V1, "a", 1)
    started = pids(noted)
    assert len(started) == 2
    wait_until(lambda: not any(alive(pid) for pid in started), 5, "the gate's end")


async def test_gate_cancellation_kills_the_process_group(tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    task = asyncio.create_task(score(gate(SLEEPER, str(noted))))
    await asyncio.to_thread(wait_until, lambda: len(pids(noted)) == 2, 10, "the gate's start")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_until(lambda: not any(alive(pid) for pid in pids(noted)), 5, "the gate's end")


def test_gate_digest_changes_with_the_command() -> None:
    assert gate("a").sha256 == gate("a", silence_s=3).sha256 != gate("b").sha256


async def test_gate_digest_changes_with_the_code(tmp_path: Path) -> None:
    (tmp_path / "scoring.py").write_text("score = 0.5\n")
    (tmp_path / "gate.py").write_text(
        NAMED
        + "from scoring import score\nfor line in sys.stdin:\n"
        + "    print(json.dumps(json.loads(line) | {'score': score}), flush=True)\n"
    )
    program = Gate(GateSettings(command=("{python}", str(tmp_path / "gate.py")), base_url="http://g/v1"))
    first = program.sha256
    assert await score(program) == 0.5
    assert program.sha256 == first
    (tmp_path / "scoring.py").write_text("score = 0.75\n")
    assert await score(program) == 0.75
    assert program.sha256 != first, "scores of another program would be compared with those of the first"


TASKS = Tasks(gate=("a", "b"), audit=("c",))
PLAYS = [Play(version="m@0123456789ab", task="ab"[seed % 2], seed=seed) for seed in range(40)]


class FakeWorker:
    """Worker that completes `lives` plays and is then lost."""

    def __init__(self, lives: float = float("inf"), tasks: Tasks = TASKS) -> None:
        self.lives = lives
        self.played: list[Play] = []
        self._tasks = tasks

    async def tasks(self) -> Tasks:
        return self._tasks

    async def play(self, play: Play) -> float:
        await asyncio.sleep(0)
        if len(self.played) >= self.lives:
            raise WorkerLost("its machine is away")
        self.played.append(play)
        return play.seed / 100


def dispatcher(*machines: GateWorker) -> PlayDispatcher:
    return PlayDispatcher({f"worker-{number}": machine for number, machine in enumerate(machines)})


async def test_dispatcher_shares_plays_equally() -> None:
    machines = [FakeWorker() for _ in range(4)]
    dealing = dispatcher(*machines)
    assert await dealing.tasks() == TASKS
    assert await asyncio.gather(*map(dealing.play, PLAYS)) == [play.seed / 100 for play in PLAYS]
    assert [len(machine.played) for machine in machines] == [10] * 4


@pytest.mark.parametrize("seed", range(20))
async def test_dispatcher_moves_plays_of_a_lost_worker(seed: int) -> None:
    draw = random.Random(seed)
    machines = [FakeWorker(), *(FakeWorker(lives=draw.randint(0, 12)) for _ in range(draw.randint(1, 5)))]
    draw.shuffle(machines)
    assert await asyncio.gather(*map(dispatcher(*machines).play, PLAYS)) == [play.seed / 100 for play in PLAYS], seed
    assert sorted(play.seed for machine in machines for play in machine.played) == list(range(40)), seed


async def test_dispatcher_fails_without_workers() -> None:
    dealing = dispatcher(FakeWorker(lives=1), FakeWorker(lives=0))
    await dealing.play(PLAYS[0])
    with pytest.raises(GateFailed, match="every worker"):
        await dealing.play(PLAYS[1])


async def test_dispatcher_does_not_retry_a_failed_program() -> None:
    """The worker's machine is healthy, so a failure of the program is a failure of the run, as with one machine."""

    class Broken(FakeWorker):
        async def play(self, play: Play) -> float:
            raise GateFailed("it ended with status 3")

    other = FakeWorker()
    with pytest.raises(GateFailed, match="status 3"):
        await dispatcher(Broken(), other).play(PLAYS[0])
    assert other.played == []


async def test_dispatcher_refuses_workers_with_different_tasks() -> None:
    with pytest.raises(GateFailed, match="worker-0 and worker-1"):
        await dispatcher(FakeWorker(), FakeWorker(tasks=Tasks(gate=("a",), audit=("c",)))).tasks()


async def input_lines() -> AsyncIterator[str]:
    for play in PLAYS:
        yield play.model_dump_json() + "\n"


async def test_gate_workers_follow_the_protocol_of_the_gate() -> None:
    out = io.StringIO()
    await serve(dispatcher(FakeWorker(lives=7), FakeWorker()), input_lines(), out, start_s=5)
    first, *played = map(json.loads, out.getvalue().splitlines())
    assert Tasks.model_validate(first) == TASKS
    assert sorted((decision["seed"], decision["score"]) for decision in played) == [
        (seed, seed / 100) for seed in range(40)
    ]


def test_worker_names_are_limited_by_concurrency() -> None:
    assert len(worker_names(64, 16)) == 16
    assert len(worker_names(3, 16)) == 3


def test_gate_starts_gate_workers_only_when_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("{python}", "gate.py")
    alone, spread = (GateSettings(command=command, ray=GateRaySettings(workers=number)) for number in (0, 2))
    assert Gate(alone)._command()[1] == "gate.py"
    module, settings = Gate(spread)._command()[2:]
    assert (module, GateSettings.model_validate_json(settings)) == ("headrace_registry.gate_workers", spread)
    assert Gate(alone).sha256 == Gate(spread).sha256, "the same plays, so the scores of the two are compared"
    monkeypatch.setattr(gate_module, "find_spec", lambda _: None)
    Gate(alone)
    with pytest.raises(SettingError, match=r"headrace-registry\[ray\]"):
        Gate(spread)


GATE = """
import json, sys, urllib.request
base_url, = sys.argv[1:]
print(json.dumps({"gate": ["a", "b"], "audit": ["c"]}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    body = {"model": asked["version"], "messages": [{"role": "user", "content": "q"}]}
    request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request) as answer:
        text = json.load(answer)["choices"][0]["message"]["content"]
    print(json.dumps(asked | {"score": float(text == "42")}), flush=True)
"""


async def problems(tmp_path: Path, source: str, *, silence_s: float = 60.0) -> list[str]:
    (tmp_path / "gate.py").write_text(source)
    command = ["{python}", str(tmp_path / "gate.py"), "{base_url}"]
    settings = RegistrySettings.model_validate({"gate": {"command": command, "silence_s": silence_s}})
    return await check(Common(), settings)


async def test_check_accepts_any_scores(tmp_path: Path) -> None:
    assert await problems(tmp_path, GATE) == []


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_that_name", "No module named 'nothing_of_that_name'"),
        ("print('score: 7')", "line 1 of its output is not"),
        ("""print('{"task": "a", "score": 0.5}')""", 'line 1 of its output is not {"gate": [names of tasks]'),
        ("""print('{"gate": ["a", "b"], "audit": ["b"]}')""", "1 tasks are in both gate and audit, e.g. 'b'"),
        ("", "the program ended before naming its tasks"),
    ],
)
async def test_check_refuses_a_failing_gate_with_its_message(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(SettingError, match=r"registry\.gate\.command.*against a stand-in gateway") as refused:
        await problems(tmp_path, source)
    assert message in str(refused.value)


def test_settings_refuse_a_gate_command_with_a_model_placeholder() -> None:
    """Earlier releases started the gate command once for each version and inserted its name."""
    with pytest.raises(ValidationError, match=r"names \{model\}: .* from its standard input.* docs/gate\.md"):
        RegistrySettings.model_validate({"gate": {"command": ["{python}", "gate.py", "{model}"]}})


async def test_check_refuses_a_missing_program(tmp_path: Path) -> None:
    settings = RegistrySettings.model_validate({"gate": {"command": [str(tmp_path / "nothing")]}})
    with pytest.raises(SettingError, match="No such file"):
        await check(Common(), settings)


async def test_check_accepts_a_slow_gate(tmp_path: Path) -> None:
    assert await problems(tmp_path, "import time; time.sleep(600)", silence_s=1.0) == []


async def test_check_passes_without_a_gate() -> None:
    assert await check(Common(), RegistrySettings()) == []


def test_stand_in_streams_and_accepts_feedback() -> None:
    with run_stand_in() as base_url:
        body = {"model": "m", "messages": [], "n": 2}
        completion = httpx.post(f"{base_url}/chat/completions", json=body).json()
        assert [choice["index"] for choice in completion["choices"]] == [0, 1]
        streamed = httpx.post(f"{base_url}/chat/completions", json=body | {"stream": True})
        assert streamed.headers["content-type"] == "text/event-stream"
        assert streamed.text.endswith("data: [DONE]\n\n")
        assert httpx.post(f"{base_url}/feedback", json={}).status_code == 202
        assert httpx.get(f"{base_url}/models").json()["data"] == []


def test_stand_in_returns_token_ids_and_logprobs() -> None:
    with run_stand_in() as base_url:
        body = {"model": "m", "messages": [], "return_token_ids": True, "logprobs": True}
        completion = httpx.post(f"{base_url}/chat/completions", json=body).json()
    (choice,) = completion["choices"]
    counts = (len(completion["prompt_token_ids"]), len(choice["token_ids"]), len(choice["logprobs"]["content"]))
    assert counts == (completion["usage"]["prompt_tokens"], *[completion["usage"]["completion_tokens"]] * 2)
