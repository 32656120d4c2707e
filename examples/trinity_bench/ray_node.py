"""A Ray cluster of one machine for Trinity's benches, on the loopback interface."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

_START_S = 300.0
_LOOPBACK = "127.0.0.1"


@contextlib.contextmanager
def ray_node(program: Path, cpus: int, environment: Mapping[str, str]) -> Iterator[str]:
    """Its address; ended with the body, and with this process. `program` is Trinity's `ray`, `environment` what its
    workers have. Raises `TimeoutError`."""
    with tempfile.TemporaryDirectory(prefix="hr-ray-") as folder:  # short: sockets are in it
        address = f"{_LOOPBACK}:{_free_port()}"
        command = [
            *(str(program), "start", "--head", "--block", "--disable-usage-stats", "--include-dashboard=false"),
            *(f"--node-ip-address={_LOOPBACK}", f"--port={address.partition(':')[2]}", f"--num-cpus={cpus}"),
            *("--num-gpus=0", "--object-store-memory=200000000", f"--temp-dir={folder}"),
        ]
        node = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            _wait(program, address, environment, node)
            yield address
        finally:
            node.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.wait(20)
            node.kill()


def _wait(program: Path, address: str, environment: Mapping[str, str], node: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + _START_S
    while node.poll() is None and time.monotonic() < end_s:
        asked = subprocess.run(
            [str(program), "status", f"--address={address}"], env=environment, capture_output=True, check=False
        )
        if asked.returncode == 0:
            return
        time.sleep(0.5)
    raise TimeoutError(f"Ray has not started at {address} within {_START_S:g} s")


def _free_port() -> int:
    with socket.socket() as chosen:
        chosen.bind((_LOOPBACK, 0))
        return int(chosen.getsockname()[1])
