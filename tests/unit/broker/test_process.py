"""Tests of the broker as a process: password authentication, start, refused start, and shutdown."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from pydantic import SecretStr

from headrace_broker.broker import Credentials, Login
from headrace_broker.dispatch import APIS, BEFORE_LOGIN
from headrace_runtime.errors import SettingError, Unavailable
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.topics import check_login, client_options
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from tests.support.presence import draw_seed
from tests.support.processes import free_port
from tests.support.servers import BrokerProcess
from tests.support.turns import experience

PASSWORD = "a-password-of-the-bus"
_SIZE = struct.Struct(">i")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(tmp_path_factory.mktemp("broker"), BUS__PASSWORD=PASSWORD)
    process.start()
    yield process
    process.stop()


@pytest.fixture
def settings(broker: BrokerProcess) -> BusSettings:
    return BusSettings(address=broker.address, password=SecretStr(PASSWORD))


def frame(key: int, version: int, body: bytes = b"", correlation: int = 7) -> bytes:
    head = struct.pack(">hhih", key, version, correlation, -1) + body
    return _SIZE.pack(len(head)) + head


def plain(message: bytes, version: int = 1) -> bytes:
    return frame(17, 1, struct.pack(">h", 5) + b"PLAIN") + frame(36, version, _SIZE.pack(len(message)) + message)


async def answers(broker: BrokerProcess, *frames: bytes) -> list[bytes]:
    """Return the broker's responses until it closes the connection or sends nothing for a second."""
    reader, writer = await asyncio.open_connection("127.0.0.1", broker.port)
    responses: list[bytes] = []
    try:
        for frame in frames:
            writer.write(frame)
            try:
                async with asyncio.timeout(1.5):
                    (size,) = _SIZE.unpack(await reader.readexactly(4))
                    responses.append(await reader.readexactly(size))
            except TimeoutError:
                continue
    except (EOFError, ConnectionError):
        pass
    finally:
        writer.close()
    return responses


@pytest.mark.parametrize("api", [api for api in APIS if api.key not in BEFORE_LOGIN], ids=lambda api: api.name)
async def test_no_request_is_served_before_the_login(broker: BrokerProcess, api: Any) -> None:
    for version in api.supported_versions:
        body = bytes(64)
        assert await answers(broker, frame(api.key, version, body)) == []
        assert len(await answers(broker, frame(18, 0), frame(api.key, version, body))) == 1
        wrong = plain(b"\0headrace\0wrong")
        assert len(await answers(broker, wrong, frame(api.key, version, body))) <= 2


async def test_wrong_logins_are_refused_and_the_right_one_is_taken(broker: BrokerProcess) -> None:
    seed = draw_seed()
    rng = random.Random(seed)
    right = b"\0headrace\0" + PASSWORD.encode()
    wrong = [b"", b"\0", b"\0\0", right[:-1], right + b"x", right.upper(), b"x" + right.replace(b"headrace", b"root"),
             right + b"\0", PASSWORD.encode(), b"\0" + PASSWORD.encode(), b"\0headrace\0"]  # fmt: skip
    wrong += [rng.randbytes(rng.randrange(1, 80)) for _ in range(40)]
    credentials = Credentials("headrace", PASSWORD)
    assert not [message for message in wrong if Login(credentials).authenticate(message)]
    assert Login(credentials).authenticate(right)
    assert Login(credentials).authenticate(b"somebody" + right), "an identity to act as is ignored"
    assert Login(Credentials()).done, "without a password anybody may do anything"
    refused = await answers(
        broker, frame(17, 1, struct.pack(">h", 5) + b"PLAIN"), frame(36, 1, _SIZE.pack(3) + b"\0a\0")
    )
    assert struct.unpack_from(">ih", refused[1]) == (7, 58)


async def test_what_is_sent_before_the_login_is_bounded(broker: BrokerProcess) -> None:
    assert await answers(broker, _SIZE.pack(1_000_000) + bytes(100)) == []
    assert len(await answers(broker, frame(17, 1, struct.pack(">h", 5) + b"SCRAM"))) == 1


async def test_our_clients_log_in(settings: BusSettings, tmp_path: Path) -> None:
    await topics.ensure(settings)
    await topics.check(settings, 10)
    producer = EventProducer(settings, "headrace/test", BlobStore(tmp_path.as_uri()))
    await producer.start()
    try:
        await producer.send(experience("E", "a"))
    finally:
        await producer.stop()
    async with AIOKafkaConsumer(
        "experiences", **client_options(settings), group_id="g", auto_offset_reset="earliest"
    ) as consumer:
        assert (await asyncio.wait_for(consumer.getone(), 20)).topic == "experiences"


async def test_a_producer_stops_while_the_bus_does_not_answer(tmp_path: Path) -> None:
    """aiokafka tries again without end, as long as a record of an idempotent producer has no acknowledgement."""
    process = BrokerProcess(tmp_path / "broker")
    await asyncio.to_thread(process.start)
    own = BusSettings(address=process.address, request_timeout_s=1)
    await topics.ensure(own)
    producer = EventProducer(own, "headrace/test", BlobStore(tmp_path.as_uri()))
    await producer.start()
    await producer.send(experience("E", "a"))
    os.kill(process.pid, signal.SIGSTOP)
    try:
        sending = asyncio.create_task(producer.send(experience("F", "a")))
        await asyncio.sleep(0.1)
        async with asyncio.timeout(20):
            await producer.stop()
        with pytest.raises(Unavailable):
            await sending
    finally:
        process.kill()


@pytest.mark.parametrize("change", [{"password": SecretStr("wrong")}, {"username": "somebody"}])
async def test_a_wrong_password_fails_fast_in_one_sentence(settings: BusSettings, change: dict[str, Any]) -> None:
    wrong = settings.model_copy(update=change)
    started = time.monotonic()
    for attempt in (topics.ensure(wrong), topics.check(wrong, 10), check_login(wrong)):
        with pytest.raises(SettingError, match=r"bus\.password .* refuses it for user"):
            await attempt
    assert time.monotonic() - started < 10


async def test_a_client_without_a_login_gets_nothing(broker: BrokerProcess, settings: BusSettings) -> None:
    from aiokafka.errors import KafkaError

    producer = AIOKafkaProducer(bootstrap_servers=broker.address, request_timeout_ms=2000)
    with pytest.raises(KafkaError):
        await producer.start()
    await producer.stop()


@pytest.fixture(autouse=True)
async def _no_password_in_the_log(broker: BrokerProcess) -> AsyncIterator[None]:
    yield
    log = await asyncio.to_thread((broker._folder / "broker.log").read_text)
    assert PASSWORD not in log


START_CPU_RATIO_MAX = 4.0
"""Cost relative to an import of the event contracts here and now, because machines and their load differ."""
_IMPORTS = "import headrace_schemas.events.envelope, resource; used = resource.getrusage(resource.RUSAGE_SELF)"


@pytest.fixture
def process_broker(tmp_path: Path) -> Iterator[BrokerProcess]:
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
def test_it_starts_with_little_more_work_than_its_imports_and_stops_cleanly(process_broker: BrokerProcess) -> None:
    """The start is measured in CPU time, because other tests share the machine. `make bench` measures wall-clock
    time."""
    process_broker.start()
    process = process_broker._process
    assert process is not None
    started = _cpu_s(process.pid)
    assert started < START_CPU_RATIO_MAX * _import_cpu_s()
    process.send_signal(signal.SIGTERM)
    assert process.wait(10) == 0


def test_health_and_metrics(process_broker: BrokerProcess) -> None:
    process_broker.start()
    port = process_broker._settings["BROKER__PORT"]
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


def test_a_second_one_on_the_same_file_is_refused(process_broker: BrokerProcess, tmp_path: Path) -> None:
    process_broker.start()
    result = _run(tmp_path, BROKER__KAFKA_PORT=free_port())
    assert result.returncode == 2
    assert "another broker has opened this file" in result.stderr


def test_broker_refuses_another_address_than_loopback(tmp_path: Path) -> None:
    result = _run(tmp_path, BROKER__KAFKA_HOST="0.0.0.0")
    assert result.returncode == 2
    assert "broker.kafka_host" in result.stderr
    assert "run Apache Kafka and set bus.address" in result.stderr


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
