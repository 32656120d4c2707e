"""The broker as a process: how it starts, refuses, and stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_broker.settings import BrokerSettings
from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import load
from tests.support.broker_process import BrokerProcess
from tests.support.ports import free_port

START_CPU_RATIO_MAX = 4.0
"""Cost relative to an import of the event contracts here and now, because machines and their load differ."""
_IMPORTS = "import headrace_schemas.events.envelope, resource; used = resource.getrusage(resource.RUSAGE_SELF)"


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path, BROKER__PORT=free_port())
    yield process
    process.stop()


def _run(tmp_path: Path, *arguments: str, **settings: object) -> subprocess.CompletedProcess[str]:
    environ = {f"HEADRACE_{name}": str(value) for name, value in {"DATA_DIR": tmp_path, **settings}.items()}
    return subprocess.run(
        [sys.executable, "-m", "headrace_broker", *arguments],
        env={**os.environ, **environ}, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def _import_cpu_s() -> float:
    command = [sys.executable, "-c", f"{_IMPORTS}; print(used.ru_utime + used.ru_stime)"]
    return float(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processor time is read from /proc")
def test_it_starts_with_little_more_work_than_its_imports_and_stops_cleanly(broker: BrokerProcess) -> None:
    """Processor time, because other tests share the machine. `make bench` measures the clock."""
    broker.start()
    process = broker._process
    assert process is not None
    started = _cpu_s(process.pid)
    assert started < START_CPU_RATIO_MAX * _import_cpu_s()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_health_and_metrics(broker: BrokerProcess) -> None:
    broker.start()
    port = broker._settings["BROKER__PORT"]
    deadline = time.monotonic() + 20
    while True:
        try:
            health = urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).read()
            break
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    assert b'"store":true' in health
    metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
    assert "headrace_broker_commit_seconds_count" in metrics
    assert "headrace_broker_connections " in metrics


def test_a_second_one_on_the_same_file_is_refused(broker: BrokerProcess, tmp_path: Path) -> None:
    broker.start()
    result = _run(tmp_path, BROKER__KAFKA_PORT=free_port())
    assert result.returncode == 2
    assert "another broker has opened this file" in result.stderr


def test_it_listens_on_loopback_alone(tmp_path: Path) -> None:
    result = _run(tmp_path, BROKER__KAFKA_HOST="0.0.0.0")
    assert result.returncode == 2
    assert "broker.kafka_host" in result.stderr
    assert "listens on loopback only" in result.stderr


@pytest.mark.parametrize("host", ["192.168.1.7", "::", "broker.example"])
def test_other_addresses_are_refused_too(host: str) -> None:
    with pytest.raises(SettingError, match=r"broker\.kafka_host"):
        load("broker", BrokerSettings, None, {"HEADRACE_BROKER__KAFKA_HOST": host})


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2", "::1"])
def test_loopback_addresses(host: str) -> None:
    _, settings = load("broker", BrokerSettings, None, {"HEADRACE_BROKER__KAFKA_HOST": host})
    assert settings.kafka_host == host


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
