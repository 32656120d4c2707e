"""Both buses as processes: the embedded broker, and a private Apache Kafka node (KRaft) from jars of Maven."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support import downloads
from tests.support.processes import free_port, must_run, wait_open

KAFKA_JARS = downloads.ROOT / ".cache" / "kafka-4.3.0"
CLUSTER_ID = "5L6g3nShT-eMCtK--X86sw"


def missing_kafka() -> str | None:
    """Return why Kafka cannot be started here, or None. The first call downloads 115 MB of jars."""
    return downloads.missing_jars(Path(__file__).parent / "kafka" / "pom.xml", KAFKA_JARS, "Kafka")


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
            *self._java("-Xmx128m", *_QUICK),
            "kafka.tools.StorageTool",
            "format",
            "--standalone",
            "-t",
            CLUSTER_ID,
        ]
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
