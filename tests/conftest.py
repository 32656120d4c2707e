"""Servers that many tests share. Each starts on first use and stops with the session."""

from __future__ import annotations

import functools
import gc
import os
import ssl
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import httpcore2
import hypothesis
import pytest
import typer.main
import typer.testing

from tests.support import presence, processes, servers
from tests.support.presence import FIXED
from tests.support.servers import BrokerProcess, KafkaNode

processes.start_reaper()
hypothesis.settings.register_profile(
    "headrace",
    derandomize=FIXED,
    deadline=None,  # the time of an example depends on the other processes of the machine
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("headrace")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # models this small gain nothing from a second, and workers are many


def _build_shared_objects_once() -> None:
    """Share the certificates of HTTP clients, 30 ms of CPU for each, and the tree of commands, 50 ms for each call."""
    load = functools.cache(lambda _file, _folder, trust_env: _load_certificates(_trust_env=trust_env))

    def certificates(*, _trust_env: bool = True) -> ssl.SSLContext:
        return load(os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"), _trust_env)

    httpcore2.default_ssl_context = certificates
    typer.testing._get_command = functools.cache(typer.main.get_command)  # type: ignore[attr-defined]


_load_certificates = httpcore2.default_ssl_context
_build_shared_objects_once()


@pytest.fixture(scope="session")
def embedded_bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap address of an embedded broker."""
    yield from _broker_address(tmp_path_factory)


@pytest.fixture(scope="module")
def module_bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap address of an embedded broker for the tests of one module alone."""
    yield from _broker_address(tmp_path_factory)


def _broker_address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    broker = BrokerProcess(tmp_path_factory.mktemp("broker"))
    broker.start()
    yield broker.address
    broker.stop()


@pytest.fixture(scope="session")
def kafka_bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Bootstrap address of a real Apache Kafka."""
    presence.need("kafka")
    node = KafkaNode(tmp_path_factory.mktemp("kafka"), brief=True)
    node.start()
    yield node.address
    node.stop()


@pytest.fixture(params=["embedded", pytest.param("kafka", marks=pytest.mark.kafka)])
def bus(request: pytest.FixtureRequest) -> str:
    """The bootstrap address, once for each bus that we support."""
    address: str = request.getfixturevalue(f"{request.param}_bus")
    return address


@pytest.fixture(scope="session")
def postgres() -> Iterator[servers.PostgresNode]:
    presence.need("postgres")
    # Not under pytest's folder: each start of another pytest closes that to the user that the server runs as.
    with tempfile.TemporaryDirectory(prefix=processes.folder_prefix("postgres")) as folder:
        node = servers.PostgresNode(Path(folder), durable=False)
        node.start()
        yield node
        node.stop()


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def database_url(request: pytest.FixtureRequest) -> str:
    """`database.url` as a setting, once for each database that we support."""
    if request.param == "sqlite":
        return "sqlite"
    node: servers.PostgresNode = request.getfixturevalue("postgres")
    return node.empty_url()


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """After the terminal reporter is there."""
    presence.start_heartbeat(config)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before `-m` chooses: tests that need a server of others, Kafka or PostgreSQL, are long.

    A node of Kafka is a Java process in each worker, and each test on PostgreSQL makes a database of its own.
    """
    for item in items:
        if item.get_closest_marker("kafka") or item.get_closest_marker("postgres"):
            item.add_marker(pytest.mark.long)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Pause garbage collection while test modules are imported, and freeze what they imported.

    Each full collection looks through torch, for half a second: ten of them during the imports, then one between tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.set_threshold(10_000)  # each of the many collections costs more than the memory of this many objects
        gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Send the servers that a worker used to the process that writes the summary."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["servers_used"], output["servers_absent"] = sorted(presence.used), presence.absent


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Receive the servers that a worker used. A crashed worker sends none."""
    output = getattr(node, "workeroutput", {})
    presence.used.update(output.get("servers_used", ()))
    presence.absent.update(output.get("servers_absent", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the real servers that were used and which tests did not run for want of one."""
    ran = ["the embedded broker", "SQLite", *sorted(presence.used)]
    terminalreporter.write_line(f"real parts used where a test asked for them: {', '.join(ran)}")
    for name, reason in sorted(presence.absent.items()):
        terminalreporter.write_line(f"NOT RUN: tests that need {name} ({reason})", yellow=True)
