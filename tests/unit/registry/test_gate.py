"""The gate gives scores or fails with its reason; it never gives a wrong score, and nothing of it stays behind."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from headrace_registry.gate import Gate, GateFailed, parse
from headrace_registry.settings import GateSettings
from tests.support.processes import alive, wait_until


def gate(code: str, *arguments: str, timeout_s: float = 20.0) -> Gate:
    command = (sys.executable, "-S", "-c", code, *arguments)
    return Gate(GateSettings(command=command, base_url="http://g/v1", timeout_s=timeout_s, output_bytes_max=2000))


async def test_the_program_gets_version_and_url_and_its_lines_are_scores() -> None:
    code = """
import json, sys
print("playing", file=sys.stderr)
print(json.dumps({"task": sys.argv[1], "score": 1, "note": "extra fields are its own business"}))
print()
print(json.dumps({"task": sys.argv[2], "score": 0.25}))
print(json.dumps({"task": sys.argv[2], "score": 0.75}))
"""
    scores = await gate(code, "{model}", "url={base_url}").play("m@0123456789ab")
    assert scores == {"m@0123456789ab": 1.0, "url=http://g/v1": 0.5}


async def test_the_programs_interpreter_may_be_the_registrys_own() -> None:
    code = "import json, sys; print(json.dumps({'task': sys.argv[1], 'score': 1}))"
    assert await gate(code, "{python}").play("m@0123456789ab") == {sys.executable: 1.0}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import sys; sys.exit('no gateway')", r"status 1: no gateway"),
        ('import sys; print(\'{"task": "a", "score": 1}\'); sys.exit(3)', r"status 3: no message"),
        ("pass", "it printed no score"),
        ("print('hello')", r"line 1 .*Invalid JSON"),
        ('print(\'{"task": "a", "score": 1.5}\')', r"line 1 .*score: .*less than or equal to 1"),
        ('print(\'{"task": "a", "score": NaN}\')', r"line 1 "),
        ('print(\'{"task": "a"}\')', r"line 1 .*score: Field required"),
        ("print('x' * 5000)", r"gate\.output_bytes_max = 2000"),
    ],
)
async def test_failures_say_why(code: str, message: str) -> None:
    with pytest.raises(GateFailed, match=message):
        await gate(code).play("m@0123456789ab")


async def test_a_program_that_does_not_exist() -> None:
    with pytest.raises(GateFailed, match="no-such-gate: No such file"):
        await Gate(GateSettings(command=("no-such-gate",))).play("m@0123456789ab")


SLEEPER = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""


def pids(path: Path) -> list[int]:
    return [int(text) for text in path.read_text().split()] if path.exists() else []


async def test_a_time_out_kills_the_whole_group(tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    with pytest.raises(GateFailed, match=r"gate\.timeout_s = 1"):
        await gate(SLEEPER, str(noted), timeout_s=1).play("m@0123456789ab")
    started = pids(noted)
    assert len(started) == 2
    wait_until(lambda: not any(alive(pid) for pid in started), 5, "the gate's end")


async def test_cancelling_kills_the_whole_group(tmp_path: Path) -> None:
    noted = tmp_path / "pids"
    task = asyncio.create_task(gate(SLEEPER, str(noted)).play("m@0123456789ab"))
    await asyncio.to_thread(wait_until, lambda: len(pids(noted)) == 2, 10, "the gate's start")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wait_until(lambda: not any(alive(pid) for pid in pids(noted)), 5, "the gate's end")


def test_another_command_is_another_gate() -> None:
    assert gate("a").sha256 == gate("a", timeout_s=3).sha256 != gate("b").sha256


def test_half_a_result_is_none() -> None:
    with pytest.raises(GateFailed, match="line 2"):
        parse(b'{"task": "a", "score": 1}\n{"task": "b", "sc')
