"""A bound child ends with its parent, even one that was killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace_runtime.process import liveness, parent_death
from headrace_runtime.process.parent_death import bound_to_parent
from tests.support.processes import alive, wait_until

PARENT = """
import subprocess, sys
from headrace_runtime.process.parent_death import bound_to_parent
child = subprocess.Popen(bound_to_parent(["sleep", "600"]))
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
    code = "import sys; print(sys.argv[1:]); sys.exit(7)"
    process = subprocess.run(bound_to_parent([sys.executable, "-c", code, "a b", "-x"]), capture_output=True, text=True)
    assert (process.stdout, process.returncode) == ("['a b', '-x']\n", 7)


def test_the_variable_is_that_of_the_pipe() -> None:
    assert parent_death._LIVENESS == liveness.VARIABLE


def test_a_command_that_does_not_exist_is_named() -> None:
    process = subprocess.run(bound_to_parent(["no-such-command"]), capture_output=True, text=True)
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
    os.execv(sys.executable, parent_death.bound_to_parent([sys.executable, "-c", inner], handed_over)[:4]
             + [str(os.getppid()), str(handed_over), sys.executable, "-c", inner])
assert os.wait()[1] == 0
assert os.read(reading, 10) == b"."
"""


def test_the_socket_and_the_pipe_do_not_take_each_others_place() -> None:
    process = subprocess.run([sys.executable, "-c", SHARED_DESCRIPTORS], capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
