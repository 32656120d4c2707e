"""A death is known on the machine of the dead process, and on no other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace_runtime.process import holders


def of(pid: int, **changes: str) -> str:
    host, boot, space, _, _, name = holders.new_holder().split("|")
    named = {"host": host, "boot": boot, "space": space, "started": holders._start_ticks(pid) or "0"} | changes
    return "|".join((named["host"], named["boot"], named["space"], str(pid), named["started"], name))


@pytest.fixture
def dead() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_the_living_are_not_dead() -> None:
    assert not holders.is_dead(of(os.getppid()))


def test_the_dead_are(dead: int) -> None:
    assert holders.is_dead(of(dead))


def test_a_zombie_is_dead() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    name = of(process.pid)
    assert not holders.is_dead(name)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert holders.is_dead(name)
    process.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says when a process started")
def test_a_number_that_was_given_again_is_another_process() -> None:
    assert holders.is_dead(of(os.getppid(), started="1"))


@pytest.mark.parametrize("change", [{"host": "elsewhere"}, {"boot": "before"}, {"space": "container"}])
def test_of_other_machines_nothing_is_known(dead: int, change: dict[str, str]) -> None:
    assert not holders.is_dead(of(dead, **change))


@pytest.mark.parametrize("name", ["", "host:1:x", "a|b", "a|b|c|d|e|f"])
def test_of_names_in_another_form_nothing_is_known(name: str) -> None:
    assert not holders.is_dead(name)


def test_each_name_is_another_one_and_readable() -> None:
    assert holders.new_holder() != holders.new_holder()
    assert holders.describe(holders.new_holder()).startswith(f"process {os.getpid()} on ")
    assert holders.describe("elsewhere:1:x") == "elsewhere:1:x"
