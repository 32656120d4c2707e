"""A copy of the gate's program that was started ahead of the trial: it is used once, and only while it is whole."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from headrace_registry.gate.gate import Gate, GateFailed
from headrace_registry.settings import GateSettings
from tests.support.processes import alive, wait_until
from tests.unit.registry.test_gate import V1, gate, pids

COUNTED = """
import json, os, sys
with open(sys.argv[1], "a") as started:
    started.write(f"{os.getpid()}\\n")
print(json.dumps({"gate": ["a"], "audit": ["c"]}), flush=True)
for line in sys.stdin:
    print(json.dumps(json.loads(line) | {"score": 0.5}), flush=True)
"""


async def started_in(file: Path) -> int:
    """Wait until a program has written its process id, and return the first."""
    await asyncio.to_thread(wait_until, lambda: pids(file), 60, "the spare program's start")
    return pids(file)[0]


async def test_gate_session_uses_the_program_that_was_started_ahead(tmp_path: Path) -> None:
    started = tmp_path / "started"
    program = gate(COUNTED, str(started))
    program.prepare()
    program.prepare()
    await started_in(started)
    async with program.session() as fresh:
        assert await fresh.play(V1, "a", 1) == 0.5, "an audit leaves the spare program to the next trial"
    async with program.session(use_spare=True) as session:
        assert len(pids(started)) == 2
        assert await session.play(V1, "a", 7) == 0.5
    assert not any(alive(pid) for pid in pids(started))
    async with program.session(use_spare=True):
        assert len(pids(started)) == 3, "a spare program is used once"


async def test_gate_session_starts_an_edited_program_again(tmp_path: Path) -> None:
    file, started = tmp_path / "gate.py", tmp_path / "started"
    file.write_text(COUNTED)
    program = Gate(GateSettings(command=("{python}", str(file), str(started)), base_url="http://g/v1"))
    program.prepare()
    await started_in(started)
    file.write_text(COUNTED.replace("0.5", "0.25"))
    async with program.session(use_spare=True) as session:
        assert await session.play(V1, "a", 7) == 0.25
        assert len(pids(started)) == 2
        assert not alive(pids(started)[0])
    assert program.sha256 == Gate(program._settings).sha256


@pytest.mark.parametrize("ended_by", ["itself", "the time that it may wait"])
async def test_gate_session_does_without_a_spare_program_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    if ended_by != "itself":
        monkeypatch.setattr("headrace_registry.gate.gate._SPARE_S", 0.01)
    started = tmp_path / "started"
    program = gate(COUNTED, str(started))
    program.prepare()
    pid = await started_in(started)
    if ended_by == "itself":
        os.kill(pid, signal.SIGKILL)
    entry = Path(f"/proc/{pid}")  # a zombie still has it: it goes once the event loop has heard of the end
    await asyncio.to_thread(wait_until, lambda: not entry.exists(), 60, "the spare program's end")
    await asyncio.sleep(0.05)
    async with program.session(use_spare=True) as session:
        assert await session.play(V1, "a", 7) == 0.5
    assert len(pids(started)) == 2


async def test_gate_cancellation_kills_a_spare_program_that_has_named_no_tasks(tmp_path: Path) -> None:
    started = tmp_path / "started"
    program = gate(COUNTED.replace("print(", "sys.stdin.read(); print("), str(started))
    program.prepare()
    pid = await started_in(started)
    trial = asyncio.create_task(program.session(use_spare=True).__aenter__())
    await asyncio.sleep(0)
    trial.cancel()
    async with asyncio.timeout(15):
        with pytest.raises(asyncio.CancelledError):
            await trial
    assert not alive(pid)


async def test_gate_spare_program_that_fails_is_reported_by_the_trial_alone() -> None:
    program = gate("import sys; sys.exit('no gateway')")
    program.prepare()
    with pytest.raises(GateFailed, match="no gateway"):
        async with program.session(use_spare=True):
            pass
