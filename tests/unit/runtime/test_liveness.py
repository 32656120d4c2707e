"""Tests of the liveness of event loops and of child processes, and of the pauses of garbage collection.

An event loop reports that it runs, and stops reporting when it hangs; silence counts only while the watcher runs. The
parent of a service in a container forwards signals, returns the service's status, and kills a hung service. A bound
child ends with its parent, even if the parent was killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from headrace_collector import __main__ as collector
from headrace_judge import __main__ as judge
from headrace_runtime.main import GARBAGE_THRESHOLD
from headrace_runtime.process import liveness, parent_death
from headrace_runtime.process.liveness import LivenessWatch
from headrace_runtime.process.parent_death import parent_bound_command
from headrace_scorer import __main__ as scorer
from tests.support.processes import alive, wait_until

PROGRAM = """
import gc, json, resource, weakref
from headrace_runtime.main import GARBAGE_THRESHOLD, tune_garbage_collection

class Cycle:
    def __init__(self):
        self.me = self
        self.payload = bytearray(256)

passes = []
gc.callbacks.append(lambda phase, info: passes.append(info["generation"]) if phase == "start" else None)

def work(rounds):
    passes.clear()
    for _ in range(rounds):
        Cycle()
    return len(passes)

untuned = work(500_000)
imported = len(gc.get_objects())
tune_garbage_collection(GARBAGE_THRESHOLD)
left = len(gc.get_objects())
tuned = work(500_000)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
work(2_000_000)
growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
last = weakref.ref(Cycle())
gc.collect()
print(json.dumps([untuned, tuned, imported, left, growth, last() is None]))
"""


def test_the_loop_writes_while_it_turns_and_not_while_it_is_stuck() -> None:
    reading, writing = os.pipe()
    pipe = liveness.take_inherited_pipe(environ := {liveness.VARIABLE: str(writing), "OTHER": "1"})
    assert (pipe, environ) == (writing, {"OTHER": "1"})
    assert not os.get_inheritable(writing)

    async def body() -> None:
        async with liveness.send_heartbeats(pipe):
            await asyncio.sleep(0)
            assert os.read(reading, 100) == b"."
            os.set_blocking(reading, False)
            stuck = subprocess.run([sys.executable, "-c", "import time; time.sleep(1)"], check=True)  # noqa: ASYNC221
            assert stuck.returncode == 0
            with pytest.raises(BlockingIOError):
                os.read(reading, 100)
            os.set_blocking(reading, True)
            assert await asyncio.to_thread(os.read, reading, 100), "it turns again"

    asyncio.run(body())
    os.close(writing)
    os.close(reading)


def test_progress_of_a_thread_is_a_sign_of_life_while_the_loop_waits_and_a_hang_gives_none() -> None:
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    watch = LivenessWatch()
    watch.reading = reading
    pipe = liveness.take_inherited_pipe({liveness.VARIABLE: str(writing)})
    pieces, hang = threading.Semaphore(0), threading.Event()

    def work() -> None:
        while pieces.acquire() and not hang.is_set():
            liveness.progress()

    async def body() -> None:
        async with liveness.send_heartbeats(pipe):
            await asyncio.sleep(0)
            thread = threading.Thread(target=work)
            thread.start()
            watch.started(0.0)
            watch.poll(0.0)
            for second in range(1, 4):  # the loop is stuck in here, and pieces are finished beside it
                time.sleep(liveness.INTERVAL_S)  # noqa: ASYNC251 (that is how it is stuck)
                pieces.release()
                assert select.select([reading], [], [], 10)[0], "no sign of life of the thread"
                watch.poll(float(second))
                assert watch.silent_s == 0.0
            for second in range(4, 44):  # both are stuck
                watch.poll(float(second))
            assert watch.silent_s == 40.0
            hang.set()
            pieces.release()
            thread.join()

    asyncio.run(body())
    liveness.progress()
    os.close(writing)
    watch.close()


def test_a_reader_that_is_away_stops_nobody() -> None:
    reading, writing = os.pipe()
    pipe = liveness.take_inherited_pipe({liveness.VARIABLE: str(writing)})
    assert pipe is not None
    with contextlib.suppress(BlockingIOError):
        while os.write(writing, b"." * 4096):
            pass

    async def body() -> None:
        async with liveness.send_heartbeats(pipe):
            await asyncio.sleep(0.01)
        os.close(reading)
        async with liveness.send_heartbeats(pipe):
            await asyncio.sleep(0.01)

    asyncio.run(body())
    os.close(writing)


def test_without_a_pipe_nothing_is_written() -> None:
    assert liveness.take_inherited_pipe({}) is None
    assert liveness.take_inherited_pipe({liveness.VARIABLE: "nonsense"}) is None
    assert liveness.take_inherited_pipe({liveness.VARIABLE: "987654"}) is None, "closed on the way"


def test_silence_that_nobody_watched_does_not_count() -> None:
    watch = LivenessWatch()
    writing = os.dup(watch.open())
    watch.started(0.0)
    watch.poll(1.0)
    assert (watch.silent_s, watch.beats) == (1.0, False)
    watch.poll(3600.0)
    assert watch.silent_s < 10.0, "the watcher was away, or the machine asleep"
    os.write(writing, b"..")
    watch.poll(3601.0)
    assert (watch.silent_s, watch.beats) == (0.0, True)
    watch.poll(3602.0)
    assert watch.silent_s == 1.0
    os.close(writing)
    watch.poll(3603.0)
    assert (watch.silent_s, watch.ended) == (2.0, True), "an end that is closed says nothing"
    watch.close()


SERVICE = """
import asyncio, os, pathlib, signal, sys, time
from headrace_runtime.process import liveness

async def main():
    pathlib.Path(sys.argv[1]).write_text(str(os.getpid()))
    if sys.argv[2] == "stuck":
        time.sleep(600)
    if sys.argv[2] == "status":
        sys.exit(int(sys.argv[3]))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: os._exit(7))
    await asyncio.sleep(600)

async def serve():
    async with liveness.send_heartbeats(liveness.take_inherited_pipe(os.environ)):
        await asyncio.sleep(0)
        await main()

asyncio.run(serve())
"""


class Watched:
    def __init__(self, folder: Path, *arguments: str, hang_timeout_s: str = "2") -> None:
        self._file = folder / "pid"
        command = [sys.executable, "-m", "headrace_runtime.watchdog", sys.executable, "-c", SERVICE]
        self.watchdog = subprocess.Popen(
            [*command, str(self._file), *arguments],
            env={**os.environ, "HANG_TIMEOUT_S": hang_timeout_s, "START_TIMEOUT_S": "60"},
            stderr=subprocess.PIPE,
            text=True,
        )

    def pid(self) -> int:
        wait_until(lambda: self._file.exists() and self._file.read_text(), 20, "the service")
        return int(self._file.read_text())


@pytest.mark.parametrize("status", [0, 2, 3])
def test_it_ends_as_the_service_does(tmp_path: Path, status: int) -> None:
    assert Watched(tmp_path, "status", str(status)).watchdog.wait(20) == status


def test_a_stop_is_passed_on(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "run")
    watched.pid()
    watched.watchdog.send_signal(signal.SIGTERM)
    assert watched.watchdog.wait(20) in (7, 128 + signal.SIGTERM)


def test_a_killed_service_is_told_by_its_status(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "run")
    os.kill(watched.pid(), signal.SIGKILL)
    assert watched.watchdog.wait(20) == 128 + signal.SIGKILL


@pytest.mark.parametrize("how", ["stopped", "stuck"])
def test_what_hangs_is_killed(tmp_path: Path, how: str) -> None:
    watched = Watched(tmp_path, "stuck" if how == "stuck" else "run")
    pid = watched.pid()
    if how == "stopped":
        os.kill(pid, signal.SIGSTOP)
    assert watched.watchdog.wait(30) == 1
    assert not alive(pid)
    assert watched.watchdog.stderr is not None
    assert "no heartbeat within the timeout" in watched.watchdog.stderr.read()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child's life to its parent's")
def test_a_killed_watchdog_leaves_nothing(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "run")
    pid = watched.pid()
    watched.watchdog.kill()
    wait_until(lambda: not alive(pid), 10, "the service's end")


def test_a_time_that_is_none_is_refused(tmp_path: Path) -> None:
    watched = Watched(tmp_path, "run", hang_timeout_s="soon")
    assert watched.watchdog.wait(20) == 1
    assert watched.watchdog.stderr is not None
    assert "HANG_TIMEOUT_S = 'soon'" in watched.watchdog.stderr.read()


PARENT = """
import subprocess, sys
from headrace_runtime.process.parent_death import parent_bound_command
child = subprocess.Popen(parent_bound_command(["sleep", "600"]))
print(child.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can tie a child's life to its parent's")
def test_a_killed_parent_takes_its_child_along() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        assert alive(child)
        parent.kill()
        wait_until(lambda: not alive(child), 10, "the child's death")


def test_the_command_gets_its_arguments_and_gives_its_status() -> None:
    command = [sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "a b", "-x"]
    process = subprocess.run(parent_bound_command(command), capture_output=True, text=True)
    assert (process.stdout, process.returncode) == ("['a b', '-x']\n", 7)


def test_the_variable_is_that_of_the_pipe() -> None:
    assert parent_death._LIVENESS == liveness.VARIABLE


def test_a_command_that_does_not_exist_is_named() -> None:
    process = subprocess.run(parent_bound_command(["no-such-command"]), capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (127, "no-such-command: No such file or directory\n")


SHARED_DESCRIPTORS = """
import os, socket, sys
from headrace_runtime.process import parent_death
listener = socket.create_server(("127.0.0.1", 0))
reading, writing = os.pipe()
handed_over = os.dup(listener.fileno())
os.dup2(writing, 3)  # where the socket has to go
os.set_inheritable(handed_over, True)
os.environ["LIVENESS_FD"] = "3"
inner = (
    "import os, socket; assert socket.socket(fileno=3).getsockname(); os.write(int(os.environ['LIVENESS_FD']), b'.');"
)
if os.fork() == 0:
    os.execv(sys.executable, parent_death.parent_bound_command([sys.executable, "-c", inner], handed_over)[:4]
             + [str(os.getppid()), str(handed_over), sys.executable, "-c", inner])
assert os.wait()[1] == 0
assert os.read(reading, 10) == b"."
"""


def test_the_socket_and_the_pipe_do_not_take_each_others_place() -> None:
    process = subprocess.run([sys.executable, "-c", SHARED_DESCRIPTORS], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_service_collects_seldom_and_keeps_its_memory_bounded_through_two_million_cycles() -> None:
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)], check=True, capture_output=True, text=True
    ).stdout
    untuned, tuned, imported, left, growth_kib, collected = json.loads(output)
    assert tuned * 20 < untuned, "collections for the same work"
    assert left * 20 < imported, "objects that a collection looks at"
    assert growth_kib < 64 * 1024, "garbage waits for the threshold and no longer"
    assert collected


PAUSES = """
import gc, json, sys, time
from headrace_runtime.main import tune_garbage_collection

def longest_pause_s(threshold):
    tune_garbage_collection(threshold)
    began_s, pauses_s = 0.0, [0.0]
    def note(phase, info):
        nonlocal began_s
        if phase == "start":
            began_s = time.thread_time()
        elif info["generation"] == 0:
            pauses_s.append(time.thread_time() - began_s)
    gc.callbacks.append(note)
    messages = [{"role": "user", "parts": [{"text": [str(number)]}]} for number in range(60_000)]
    gc.callbacks.remove(note)
    return max(pauses_s)

print(json.dumps([min(longest_pause_s(threshold) for _ in range(3)) for threshold in map(int, sys.argv[1:])]))
"""


def test_services_that_keep_runs_collect_the_newest_objects_in_short_pauses() -> None:
    stream_services = (collector.SERVICE, scorer.SERVICE, judge.SERVICE)
    thresholds = [str(GARBAGE_THRESHOLD), *{str(service.garbage_threshold) for service in stream_services}]
    output = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PAUSES), *thresholds], check=True, capture_output=True, text=True
    ).stdout
    seldom_s, *often_s = json.loads(output)
    assert max(often_s) * 2 < seldom_s, "pause of a collection"


def test_a_process_that_floods_its_pipe_does_not_hold_the_watcher() -> None:
    watch = LivenessWatch()
    writing = watch.open()
    os.set_blocking(writing, False)
    os.write(writing, b".")  # the thread may not run before the last poll
    is_over = threading.Event()

    def flood() -> None:
        while not is_over.is_set():
            with contextlib.suppress(BlockingIOError):
                os.write(writing, b"." * 65_536)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        for _ in range(20):
            watch.poll(time.monotonic())
        assert watch.beats
        assert not watch.ended
    finally:
        is_over.set()
        thread.join()
        watch.close()


def test_only_folders_of_dead_processes_of_this_user_are_abandoned(tmp_path: Path) -> None:
    """The folders lie in /tmp, where every user can create one, and containers may share it."""

    def folder(name: str, holder: str | bytes) -> Path:
        made = tmp_path / f"x-{name}"
        made.mkdir()
        (made / "holder").write_bytes(holder.encode() if isinstance(holder, str) else holder)
        return made

    parts = liveness.new_holder().split("|")
    dead = folder("dead", "|".join([*parts[:3], "4194305", "1", "x"]))
    folder("container", "|".join([parts[0], parts[1], "pid:[1]", "4194305", "1", "x"]))
    folder("not text", b"\xff" * 9)
    (folder("pipe", "") / "holder").unlink()
    os.mkfifo(tmp_path / "x-pipe" / "holder")
    (folder("device", "") / "holder").unlink()
    (tmp_path / "x-device" / "holder").symlink_to("/dev/zero")
    (tmp_path / "x-link").symlink_to(dead)
    liveness.claim_folder(folder("own", ""))
    assert list(liveness.abandoned_folders(tmp_path, "x-*")) == [dead]
