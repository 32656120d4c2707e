"""Every service starts thin: help without heavy imports, and a clear refusal of settings that nobody would use."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

MODULES = {entry.name: entry.value for entry in entry_points(group="headrace.services")}
HEAVY = ("torch", "transformers", "faust", "aiokafka", "sqlalchemy", "starlette")
_REPORT = """
import sys, runpy
sys.argv = ["x", "--help"]
try:
    runpy.run_module("{module}", run_name="__main__")
except SystemExit as stop:
    assert not stop.code, stop.code
print("HEAVY", [name for name in {heavy} if name in sys.modules])
"""


def test_every_service_is_announced() -> None:
    assert {"gateway", "broker", "collector", "scorer", "judge", "trainer", "registry", "inference"} <= set(MODULES)


@pytest.mark.parametrize("module", MODULES.values(), ids=MODULES.keys())
def test_help_imports_nothing_heavy(module: str) -> None:
    code = _REPORT.format(module=module, heavy=HEAVY)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert "--config" in result.stdout
    assert result.stdout.endswith("HEAVY []\n")


@pytest.mark.parametrize(("name", "module"), MODULES.items(), ids=MODULES.keys())
def test_an_unknown_setting_stops_the_start(name: str, module: str) -> None:
    environ = {**os.environ, f"HEADRACE_{name.upper()}__PROT": "1"}
    result = subprocess.run(
        [sys.executable, "-m", module], capture_output=True, text=True, env=environ, timeout=30, check=False
    )
    assert result.returncode == 2
    assert f"setting {name}.prot = 1: unknown; did you mean 'port'?" in result.stderr
