"""The gate's program: it never yields a wrong score, and no process of it stays behind."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from headrace_registry.gate.gate import Gate, GateFailed, GateSession
from headrace_registry.settings import GateSettings
from headrace_schemas.programs.gate import Tasks
from tests.support.processes import alive, wait_until

V1, V2 = "m@0123456789ab", "m@ba9876543210"
NAMED = """
import json, sys
print(json.dumps({"gate": ["a", "b"], "audit": ["c"], "note": "extra fields are its own business"}), flush=True)
"""


def gate(code: str, *arguments: str, silence_s: float = 20.0) -> Gate:
    command = (sys.executable, "-S", "-c", code, *arguments)
    return Gate(GateSettings(command=command, base_url="http://g/v1", silence_s=silence_s, output_bytes_max=2000))


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
        (ANSWER + "print('x' * 5000, flush=True)", r"gate\.output_bytes_max = 2000"),
        (ANSWER + "print('{\"version', end='', flush=True)", "line 2 of its output is not"),
    ],
)
async def test_gate_failure_has_a_reason(code: str, message: str) -> None:
    with pytest.raises(GateFailed, match=message):
        await score(gate(code))


def gate_with_short_silence(session: GateSession) -> GateSession:
    """A program that has started is not waited for any more: how long the start takes is not the matter here."""
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
