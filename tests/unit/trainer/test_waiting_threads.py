"""Threads of a step wait for each other without spinning: that is a setting which torch reads when it is loaded."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

START = """
import os, runpy, sys
from headrace_runtime.main import Service
Service.main = lambda self: print(os.environ["OMP_WAIT_POLICY"], "torch" in sys.modules)
runpy.run_module("headrace_trainer", run_name="__main__")
"""


@pytest.mark.parametrize(("policy", "expected"), [(None, "passive"), ("active", "active")])
def test_it_is_set_before_torch_is_loaded_unless_somebody_else_did(policy: str | None, expected: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    if policy is not None:
        environment["OMP_WAIT_POLICY"] = policy
    command = [sys.executable, "-c", START]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
    assert process.stdout.split() == [expected, "False"]
