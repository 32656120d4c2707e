"""Every service starts thin: help without heavy imports, and a clear refusal of settings that nobody would use."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from headrace_runtime.kafka import topics
from headrace_runtime.services import installed

INSTALLED = installed()
MODULES = {name: info.module for name, info in INSTALLED.items()}
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


@pytest.mark.parametrize("topic", topics.catalogue().values(), ids=lambda topic: topic.name)
def test_services_announce_the_topics_that_name_them(topic: topics.Topic) -> None:
    readers = {name for name, info in INSTALLED.items() if topic.name in info.consumes}
    writers = {name for name, info in INSTALLED.items() if topic.name in info.produces}
    assert readers == INSTALLED.keys() & set(topic.consumers)
    assert topic.producer in writers or topic.producer not in INSTALLED


@pytest.mark.parametrize("name", MODULES)
def test_an_announcement_is_light(name: str) -> None:
    """It is imported by whoever wants to know what is installed, of every service."""
    code = f"""
import sys
from headrace_runtime import services
before = {{*sys.modules}}
services.SERVICES.get({name!r})
print(sorted(name for name in {{*sys.modules}} - before if name.startswith("headrace")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    module = MODULES[name]
    assert done.stdout.strip() == str([module, f"{module}.service"])
