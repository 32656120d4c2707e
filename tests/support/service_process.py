"""Services in separate processes: one service, a replica, a gateway and its bus, or the stack of `headrace up`."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TypeVar

import httpx
from aiokafka import ConsumerRecord, TopicPartition

from headrace_operations.supervisor import NotRunning, RunState, read
from headrace_operations.supervisor.overrides import Overrides, toml
from headrace_operations.supervisor.process import yield_processor
from headrace_runtime.kafka import topics
from headrace_runtime.kafka.consumer import assign_all, consumer, record_of
from headrace_runtime.kafka.producer import EventProducer
from headrace_runtime.kafka.wire import decode
from headrace_runtime.services import installed_services
from headrace_runtime.settings.sections import BusSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Event, Turn
from headrace_schemas.rules.turn_history import TurnHistory
from headrace_schemas.values.errors import InvalidEvent
from tests.support.processes import free_port, wait_open, wait_until

HEADRACE = str(Path(sys.executable).with_name("headrace"))
_START_S = 180.0
_STOP_S = 60.0


def run_of(folder: Path) -> RunState | None:
    """Return the state of the stack on the data directory `folder`, or None if no stack runs."""
    try:
        return read(folder)
    except NotRunning:
        return None


class HeadraceUp:
    """Process of `headrace up` that can be stopped and started again on the same data directory, each time on free
    ports.
    """

    def __init__(
        self,
        folder: Path,
        config: Path,
        settings: Mapping[str, object],
        environ: Mapping[str, str],
        program: str = HEADRACE,
        start_s: float = _START_S,
    ) -> None:
        self.folder = folder
        self._start_s = start_s
        self._command = [program, "up", "--data-dir", str(folder), "--config", str(config), "--auto-ports"]
        self._command += ["--timeout", str(start_s)]
        self._command += [word for name, value in settings.items() for word in ("--set", f"{name}={as_setting(value)}")]
        self._environ = {**os.environ, **environ}
        self._log = folder.with_name(f"{folder.name}.log")
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def state(self) -> RunState:
        return read(self.folder)

    @property
    def base_url(self) -> str:
        return self.state.base_url or ""

    @property
    def log(self) -> str:
        """Return the output of the command."""
        return self._log.read_text(encoding="utf-8")

    def start(self) -> RunState:
        """Start the stack. Return once every service is ready and the gateway serves a version."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environ)
        wait_until(self._ready, self._start_s, f"headrace up in {self.folder} is ready")
        return self.state

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> int:
        """Stop the stack as with Ctrl-C and return the exit status."""
        assert self._process is not None
        if self.running():
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()  # the services end with it
        return self._process.wait()

    def status(self) -> dict[str, object]:
        """Return `headrace status --json`. Raises an error if its counts do not add up."""
        command = [HEADRACE, "status", "--data-dir", str(self.folder), "--json"]
        process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert process.returncode == 0, f"{process.stdout}{process.stderr}"
        status: dict[str, object] = json.loads(process.stdout)
        return status

    def _ready(self) -> bool:
        assert self.running(), self.log[-3000:]
        state = run_of(self.folder)
        return state is not None and state.ready


def as_setting(value: object) -> str:
    """Return a value in the form for `--set` and the environment: a string unchanged, other values as TOML."""
    return value if isinstance(value, str) else toml(value)


class LoggedProcess:
    """A Python module as a process with a port. One log contains the output of all its starts."""

    def __init__(self, name: str, module: str, log: Path, port: int, arguments: tuple[str, ...] = ()) -> None:
        self.name = name
        self.port = port
        self._command = [sys.executable, "-m", module, *arguments]
        self._log = log
        self._environ: dict[str, str] = {}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None, "it is started first"
        return self._process.pid

    @property
    def log(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def set(self, settings: Mapping[str, object], environ: Mapping[str, str] | None = None) -> None:
        """Set the environment for each start. `environ` are variables in addition to the settings."""
        named = {f"HEADRACE_{key}": as_setting(value) for key, value in settings.items()}
        self._environ = {**os.environ, **(environ or {}), **named}

    def begin(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=self._environ)

    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def terminate(self) -> None:
        """Request a clean stop and return at once."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Wait for the end of the process and return the exit status."""
        assert self._process is not None
        return self._process.wait(timeout_s)

    def kill(self) -> None:
        process = self._process  # somebody else may start another one meanwhile
        assert process is not None
        process.kill()
        process.wait()

    def stop(self) -> int:
        """Send SIGTERM, and SIGKILL if the process still runs after 30 s. Return the exit status."""
        if self.running():
            self.terminate()
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                self.kill()
        return self.wait()


class ServiceProcess(LoggedProcess):
    """Process of `python -m headrace_<name>`. After a kill, the next start finds the state in `folder`."""

    def __init__(
        self, name: str, folder: Path, bus: str, environ: Mapping[str, str] | None = None, /, **settings: object
    ) -> None:
        """Configure the process. For `environ` see `LoggedProcess.set`."""
        port = free_port()
        super().__init__(name, f"headrace_{name}", folder / f"{name}-{port}.log", port)
        self.set({"DATA_DIR": folder, "BUS__ADDRESS": bus, f"{name.upper()}__PORT": port, **settings}, environ)
        folder.mkdir(parents=True, exist_ok=True)

    def begin(self) -> None:
        """Start the process with the priority that `headrace up` gives it."""
        super().begin()
        if installed_services()[self.name].is_background:
            yield_processor(self.pid)

    def start(self, *, ready: bool = True) -> None:
        self.begin()
        if ready:
            wait_until(self.healthy, 60, f"{self.name} is healthy; its log says {self._log}")

    def healthy(self) -> bool:
        """Return whether the service reports that it is healthy. Raises an error if the process has ended."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise AssertionError(f"{self.name} ended with status {self._process.returncode}: {self.log[-3000:]}")
        try:
            return httpx.get(f"{self.url}/health", timeout=2, trust_env=False).status_code == 200
        except httpx.HTTPError:
            return False


class ReplicaProcess(LoggedProcess):
    """Replica process that can be killed (SIGKILL), stopped (SIGTERM) and started again on the same port and folder."""

    def __init__(self, data_dir: Path, bus: str, **settings: object) -> None:
        super().__init__("inference", "headrace_inference", data_dir / "inference.log", free_port())
        self.replica_id = f"127.0.0.1:{self.port}"
        quick = {"INFERENCE__TTL_S": 3}
        place = {"DATA_DIR": data_dir, "BUS__ADDRESS": bus, "INFERENCE__PORT": self.port}
        self.set({**place, "INFERENCE__TORCH__DEVICE": "cpu", **quick, **settings})

    def start(self, timeout_s: float = 300.0) -> None:
        """Start the process and wait until it listens. Importing torch takes most of the time."""
        self.begin()
        wait_open(self.port, timeout_s)

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples."""
        lines = httpx.get(f"{self.url}/metrics", trust_env=False).text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)


E = TypeVar("E", bound=Event)


class GatewayProcess(LoggedProcess):
    """Gateway process that can be killed (SIGKILL) and started again on the same folder and port."""

    def __init__(self, folder: Path, bus: str, environ: Mapping[str, str] | None = None, /, **settings: object) -> None:
        """Configure the process. For `environ` see `LoggedProcess.set`."""
        super().__init__("gateway", "headrace_gateway", folder / "gateway.log", free_port())
        self.folder = folder
        self.set({"DATA_DIR": folder, "BUS__ADDRESS": bus, "GATEWAY__PORT": self.port, **settings}, environ)

    def start(self, timeout_s: float = 90.0) -> None:
        """Start the process and wait until it listens: 3 s on an idle machine, much longer while pytest workers share
        the cores.
        """
        self.begin()
        try:
            wait_open(self.port, timeout_s)
        except TimeoutError as error:
            raise TimeoutError(f"{error}; the gateway says {self.log[-3000:]}") from None


class BusView:
    """Client of a bus that produces and reads events as any service would. Use `bus_view`."""

    def __init__(self, settings: BusSettings, producer: EventProducer, blobs: BlobStore) -> None:
        self.settings = settings
        self._blobs = blobs
        self.producer = producer

    async def read(self, kind: type[E]) -> list[E]:
        """Return every event on the topic in order per partition, with complete turns. Damaged records are skipped."""
        events: list[E] = []
        history = TurnHistory()
        for message in await read_topic(self.settings, kind.topic):
            with contextlib.suppress(InvalidEvent):
                event = (await decode(record_of(message), self._blobs)).event
                event = history.whole_turn(event) if isinstance(event, Turn) else event
                assert isinstance(event, kind)
                events.append(event)
        return events


async def read_topic(settings: BusSettings, topic: str) -> list[ConsumerRecord]:
    """Return every record on the topic in order per partition."""
    reader = consumer(settings, "test")
    await reader.start()
    try:
        partitions: list[TopicPartition] = await assign_all(reader, topic)
        await reader.seek_to_beginning(*partitions)
        ends = await reader.end_offsets(partitions)
        records: list[ConsumerRecord] = []
        while any([await reader.position(partition) < ends[partition] for partition in partitions]):
            for messages in (await reader.getmany(timeout_ms=200)).values():
                records += messages
        return records
    finally:
        await reader.stop()


@contextlib.asynccontextmanager
async def bus_view(address: str, folder: Path) -> AsyncIterator[BusView]:
    """Connect to a bus. `folder` is the gateway's absolute data folder, whose blob store holds large events."""
    settings = Overrides(None, {}, {}).bus_settings(address)
    await topics.ensure(settings)
    blobs = BlobStore(f"file://{folder}/blobs")
    producer = EventProducer(settings, "headrace/test", blobs)  # what services of ours would send
    await producer.start()
    try:
        yield BusView(settings, producer, blobs)
    finally:
        await producer.stop()


def wait_healthy(url: str, timeout_s: float = 90) -> None:
    """Wait until `/health` returns 200. Raises `TimeoutError`."""
    import httpx2

    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(httpx2.HTTPError):
            if httpx2.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        if time.monotonic() > deadline:
            raise TimeoutError(f"{url} is not healthy after {timeout_s} s")
        time.sleep(0.05)
