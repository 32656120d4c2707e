"""A leashed child ends with its parent, even one that was killed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headrace_runtime.parent_death import leashed
from tests.support.processes import alive, wait_until

PARENT = """
import subprocess, sys
from headrace_runtime.parent_death import leashed
child = subprocess.Popen(leashed(["sleep", "600"]))
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
    done = subprocess.run(leashed([sys.executable, "-c", code, "a b", "-x"]), capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("['a b', '-x']\n", 7)


def test_a_command_that_does_not_exist_is_named() -> None:
    done = subprocess.run(leashed(["no-such-command"]), capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (127, "no-such-command: No such file or directory\n")
