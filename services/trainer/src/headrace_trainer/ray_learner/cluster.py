"""The Ray cluster that ranks run on, an existing one or a private one on this machine, and the network interface of its
address.

A process can be connected to one cluster at most, so learners of one process share the connection, and the last one to
leave closes it. A private cluster uses the loopback interface, is not announced, and ends with this process, even if
that is killed.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import signal
import socket
import struct
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray

from headrace_runtime.errors import SettingError, Unavailable
from headrace_runtime.process import liveness
from headrace_runtime.process.logs import get_logger
from headrace_trainer.ray_learner import RaySettings

_OBJECT_STORE_BYTES = 400_000_000
"""Shared memory of the private cluster. Weights pass through it in pieces."""

log = get_logger(__name__)
_LOOPBACK = "127.0.0.1"
_LOCK = threading.Lock()
_SIOCGIFADDR = 0x8915
_NAME_BYTES = 15


class Cluster:
    """Connection of this process to a Ray cluster, which ends with `leave`. Further calls of `leave` have no effect."""

    _learners = 0
    _folder: str | None = None
    _thread: ThreadPoolExecutor | None = None
    """Lives as long as the connection. Ray binds its processes to the thread that starts them: when it ends, the kernel
    kills them."""

    def __init__(self, settings: RaySettings, cpus: int) -> None:
        """Connect to a Ray cluster, or start a private one with `cpus` CPUs. Blocks.

        Raises:
            SettingError: the settings of the cluster are wrong.
            Unavailable: the cluster does not answer.
        """
        with _LOCK:
            if not ray.is_initialized():
                _start(settings, cpus)
            Cluster._learners += 1
        self._left = False

    def leave(self) -> None:
        """Release the connection. When the last learner of the process does so, it is closed and a private cluster
        ends.
        """
        with _LOCK:
            if self._left:
                return
            self._left = True
            Cluster._learners -= 1
            if Cluster._learners == 0 and Cluster._thread is not None:
                Cluster._thread.submit(ray.shutdown).result()
                _clean_up()


def _start(settings: RaySettings, cpus: int) -> None:
    Cluster._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
    try:
        if settings.address:
            Cluster._thread.submit(_join, settings).result()
        else:
            Cluster._thread.submit(_start_private, settings, cpus).result()
    except BaseException:
        _clean_up()
        raise


def _clean_up() -> None:
    if Cluster._thread is not None:
        Cluster._thread.shutdown()
        Cluster._thread = None
    if Cluster._folder is not None:
        shutil.rmtree(Cluster._folder, ignore_errors=True)
        Cluster._folder = None


def _join(settings: RaySettings) -> None:
    try:
        ray.init(address=settings.address, configure_logging=False, log_to_driver=False)
    except ConnectionError as error:
        raise Unavailable(f"no Ray cluster at trainer.ray.address = {settings.address}: {error}") from None
    except (RuntimeError, ValueError) as error:  # another version of Ray or Python, or a machine outside the cluster
        first = (str(error).splitlines() or [""])[0]
        raise SettingError("trainer.ray.address", settings.address, f"cannot be joined: {first}") from None
    log.info("ray_joined", address=settings.address)


def _start_private(settings: RaySettings, cpus: int) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # otherwise Ray stores one in the user's home
    # On slow machines Ray's own processes would consider each other dead too early.
    timeout_ms = str(int(settings.start_timeout_s * 1000))
    for name in ("agent_register_timeout_ms", "worker_register_timeout_seconds"):
        timeout = timeout_ms if name.endswith("_ms") else str(int(settings.start_timeout_s))
        os.environ.setdefault(f"RAY_{name}", timeout)
    Cluster._folder = tempfile.mkdtemp(prefix="hr-ray-")  # short, because it holds sockets, whose paths are bounded
    _sweep(Path(Cluster._folder))
    end_s = time.monotonic() + settings.start_timeout_s
    while not _try_start(settings, cpus, Cluster._folder):
        if time.monotonic() > end_s:
            raise Unavailable(f"Ray has not started on this machine within {settings.start_timeout_s:g} s")
    log.info("ray_started", folder=Cluster._folder)


def _try_start(settings: RaySettings, cpus: int, folder: str) -> bool:
    """Start Ray on this machine, which takes up to half a minute. Return whether it has started."""
    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            _node_ip_address=_LOOPBACK,
            _temp_dir=folder,
        )
    except Exception as error:  # noqa: BLE001 (it raises plain `Exception`)
        log.warning("ray_did_not_start", error=str(error))
        ray.shutdown()
        return False
    return True


def _sweep(own_folder: Path) -> None:
    """Claim this process's folder, and remove folders of killed processes together with their remaining processes."""
    liveness.claim_folder(own_folder)
    for folder in liveness.abandoned_folders(own_folder.parent, "hr-ray-*"):
        _end_users(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _end_users(folder: Path) -> None:
    """Kill the processes that have an open file in the folder, such as Ray's agents, which outlive a killed trainer."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            used = any(str(link.readlink()).startswith(f"{folder}/") for link in (process / "fd").iterdir())
            if used:
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:  # another user's process, or one that has ended
            continue


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this IPv4 address, or None if there is none."""
    try:
        packed_address = socket.inet_aton(address)
    except OSError:
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:_NAME_BYTES])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # the interface has no address
                continue
            if answer[20:24] == packed_address:
                return name
    return None
