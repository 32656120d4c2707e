"""Servers as processes: the embedded broker, Apache Kafka (KRaft, jars of Maven), and an installed PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from tests.support import packages
from tests.support.processes import free_port, must_run, wait_open, wait_until

KAFKA_JARS = packages.ROOT / ".cache" / "kafka-4.3.0"
CLUSTER_ID = "5L6g3nShT-eMCtK--X86sw"


def missing_kafka() -> str | None:
    """Return why Kafka cannot be started here, or None. The first call downloads 115 MB of jars."""
    return packages.missing_jars(Path(__file__).parent / "kafka" / "pom.xml", KAFKA_JARS, "Kafka")


_QUICK = ("-XX:TieredStopAtLevel=1",)
"""Options with which Java starts faster and runs slower: for nodes of tests, which live for a minute, not for
benchmarks.
"""


class BusProcess:
    """Process of a broker on the port `port` of this machine. Classes define `start`."""

    port: int

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


class KafkaNode(BusProcess):
    """Broker and controller in one process. `stop` ends it; the caller owns the folder.

    `advertised` are ports of proxies, each of which forwards to the port of `ports` at the same index; the broker then
    sends clients of a proxy to that proxy. With `brief`, Java compiles less and starts faster, which a benchmark must
    not do. With `password`, clients must log in as `headrace` (SASL PLAIN).
    """

    def __init__(
        self, folder: Path, advertised: Sequence[int] = (), *, brief: bool = False, password: str = ""
    ) -> None:
        super().__init__(folder)
        self._compiling = _QUICK if brief else ()
        self._password = password
        self.ports = [free_port() for _ in advertised or (0,)]
        self.port = self.ports[0]
        self._advertised = list(advertised) or self.ports
        self._controller_port = free_port()
        self._settings = folder / "server.properties"

    def start(self, timeout_s: float = 60.0) -> None:
        """Start the node and wait until it listens. Raises `TimeoutError`."""
        if not self._settings.exists():
            self._format()
        log = (self._folder / "kafka.log").open("ab")
        self._process = subprocess.Popen(
            [*self._java("-Xmx512m", *self._compiling), "kafka.Kafka", str(self._settings)],
            stdout=log,
            stderr=log,
            cwd=self._folder,
        )
        wait_open(self.port, timeout_s)

    def _format(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        names = [f"DOOR{number}" for number in range(len(self.ports))]
        listeners = [f"{name}://127.0.0.1:{port}" for name, port in zip(names, self.ports, strict=True)]
        advertised = [f"{name}://127.0.0.1:{port}" for name, port in zip(names, self._advertised, strict=True)]
        protocol, login = ("SASL_PLAINTEXT", _login(self._password, names)) if self._password else ("PLAINTEXT", "")
        self._settings.write_text(
            f"""process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:{self._controller_port}
listeners={",".join(listeners)},CONTROLLER://127.0.0.1:{self._controller_port}
advertised.listeners={",".join(advertised)}
inter.broker.listener.name={names[0]}
controller.listener.names=CONTROLLER
listener.security.protocol.map=CONTROLLER:PLAINTEXT,{",".join(f"{name}:{protocol}" for name in names)}
{login}
log.dirs={self._folder / "logs"}
auto.create.topics.enable=false
offsets.topic.replication.factor=1
offsets.topic.num.partitions=4
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
transaction.abort.timed.out.transaction.cleanup.interval.ms=500
group.initial.rebalance.delay.ms=0
"""
        )
        command = [
            *self._java("-Xmx128m", *_QUICK), "kafka.tools.StorageTool", "format", "--standalone", "-t", CLUSTER_ID,
        ]  # fmt: skip
        must_run([*command, "-c", str(self._settings)])

    def _java(self, *options: str) -> list[str]:
        return ["java", *options, "-XX:+UseSerialGC", "-cp", f"{KAFKA_JARS}/*"]


def _login(password: str, listeners: Sequence[str]) -> str:
    """Return the settings by which listeners require a login, also for the node's own connections."""
    module = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    jaas = f'{module} username="headrace" password="{password}" user_headrace="{password}";'
    lines = ["sasl.enabled.mechanisms=PLAIN", "sasl.mechanism.inter.broker.protocol=PLAIN"]
    return "\n".join([*lines, *(f"listener.name.{name.lower()}.plain.sasl.jaas.config={jaas}" for name in listeners)])


class BrokerProcess(BusProcess):
    """Broker process that can be killed (SIGKILL) and started again on the same folder and port."""

    def __init__(self, folder: Path, **settings: object) -> None:
        super().__init__(folder)
        self.port = free_port()
        self._settings = settings

    def start(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        settings = {"DATA_DIR": self._folder, "BROKER__KAFKA_PORT": self.port, "BROKER__PORT": 0, **self._settings}
        environ = {f"HEADRACE_{name}": str(value) for name, value in settings.items()}
        log = (self._folder / "broker.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace_broker"], stdout=log, stderr=log, env={**os.environ, **environ}
        )
        wait_open(self.port, 60)


def _binaries() -> Path | None:
    initdb = shutil.which("initdb")
    candidates = [Path(initdb).parent] if initdb else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next(
        (folder for folder in candidates if (folder / "initdb").exists() and (folder / "postgres").exists()), None
    )


def missing_postgres() -> str | None:
    """Return why PostgreSQL cannot be started here, or None."""
    if _binaries() is None:
        return "PostgreSQL's initdb and postgres are not installed"
    if os.geteuid() == 0 and _user() is None:
        return "initdb refuses root and there is no user `postgres` or `nobody` to run it as"
    return None


def _user() -> pwd.struct_passwd | None:
    for name in ("postgres", "nobody"):
        try:
            return pwd.getpwnam(name)
        except KeyError:
            continue
    return None


def _owner() -> int | None:
    """Return the id of the user and group to run the server as, or None for the current user."""
    user = _user() if os.geteuid() == 0 else None
    return user.pw_uid if user else None


class PostgresNode:
    """One server on loopback with trust authentication. The caller owns the folder.

    Without `durable` it never waits for the disk: its processes may be killed, but the machine must not crash.
    """

    def __init__(self, folder: Path, *, durable: bool = True) -> None:
        self._settings = () if durable else ("-c", "fsync=off")
        self.port = free_port()
        self.folder = folder
        self._data = folder / "data"
        self._process: subprocess.Popen[bytes] | None = None

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://headrace@127.0.0.1:{self.port}/{database}"

    def empty_url(self) -> str:
        """Drop the schemas of earlier tests and return the address of the database."""
        with ThreadPoolExecutor(1) as pool:  # the caller's thread may have an event loop
            pool.submit(asyncio.run, self._drop_schemas()).result()
        return self.url()

    async def _drop_schemas(self) -> None:
        import asyncpg  # type: ignore[import-untyped]  # vLLM's environment has no driver

        connection = await asyncpg.connect(self.url(), command_timeout=30)
        try:
            query = "SELECT nspname FROM pg_namespace WHERE nspname NOT SIMILAR TO '(pg_|information_schema|public)%'"
            for (name,) in await connection.fetch(query):
                await connection.execute(f'DROP SCHEMA "{name}" CASCADE')
        finally:
            await connection.close()

    def start(self) -> None:
        binaries = _binaries()
        assert binaries is not None
        owner = _owner()
        if not self._data.exists():
            self._data.mkdir(parents=True)
            self._give_away()
            options = ["-D", str(self._data), "-U", "headrace", "-A", "trust", "--no-sync"]
            must_run([str(binaries / "initdb"), *options], user=owner)
        options = ["-D", str(self._data), "-p", str(self.port), "-h", "127.0.0.1", "-k", "", *self._settings]
        log = (self.folder / "postgres.log").open("ab")
        (self._data / "postmaster.pid").unlink(missing_ok=True)  # of a server that was killed: it says "ready"
        self._process = subprocess.Popen(
            [str(binaries / "postgres"), *options], stdout=log, stderr=log, user=owner, group=owner
        )
        wait_until(self._accepts, 30, "PostgreSQL takes connections: it listens before it does")

    def _accepts(self) -> bool:
        """Return whether the server accepts connections, by the last line of its PID file (`PM_STATUS_READY`)."""
        status = self._data / "postmaster.pid"
        return status.exists() and status.read_text(encoding="utf-8").rstrip().endswith("ready")

    def kill(self) -> None:
        """Send SIGKILL to the server and all its children, because a remaining child would prevent the next start."""
        assert self._process is not None
        children = psutil.Process(self._process.pid).children(recursive=True)
        self._process.kill()
        self._process.wait()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=10)

    def stop(self) -> None:
        """Shut down in "fast" mode, because the mode of SIGTERM waits for clients with open connections."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()

    def _give_away(self) -> None:
        owner = _owner()
        if owner is None:
            return
        for folder in (self.folder, self._data):
            os.chown(folder, owner, owner)
        for parent in self.folder.parents:  # pytest's temporary folders are closed to other users
            if parent.owner() == "root" and str(parent).startswith("/tmp/"):
                parent.chmod(parent.stat().st_mode | 0o011)
