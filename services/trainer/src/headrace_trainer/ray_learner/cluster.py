"""The Ray cluster that ranks run on: one that is there, or one of our own on this machine.

A process is connected to one cluster at most, so learners of one process share the connection, and the last one to
leave ends it. A cluster of our own is on the loopback interface, tells nobody that it is used, and ends with this
process, however that ends.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray

from headrace_runtime.errors import SettingError, Unavailable
from headrace_runtime.logs import get_logger
from headrace_trainer.ray_learner.settings import RaySettings

log = get_logger(__name__)
_LOOPBACK = "127.0.0.1"
_LOCK = threading.Lock()


class Cluster:
    """Connected until `leave`, which may be called again."""

    _learners = 0
    _folder: str | None = None
    _thread: ThreadPoolExecutor | None = None
    """Lives as long as the connection. Ray binds its processes to the thread that starts them: when that ends, the
    kernel kills them."""

    def __init__(self, settings: RaySettings, cpus: int) -> None:
        """`cpus`: what ranks need, of a cluster of our own. Blocks. Raises `SettingError` and `Unavailable`."""
        with _LOCK:
            if not ray.is_initialized():
                _start(settings, cpus)
            Cluster._learners += 1
        self._left = False

    def leave(self) -> None:
        """Ends the connection with the last learner; and with it a cluster of our own."""
        with _LOCK:
            if self._left:
                return
            self._left = True
            Cluster._learners -= 1
            if Cluster._learners == 0 and Cluster._thread is not None:
                Cluster._thread.submit(ray.shutdown).result()
                _forget()


def _start(settings: RaySettings, cpus: int) -> None:
    Cluster._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
    try:
        if settings.address:
            Cluster._thread.submit(_join, settings).result()
        else:
            Cluster._thread.submit(_begin, settings, cpus).result()
    except BaseException:
        _forget()
        raise


def _forget() -> None:
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
    except (RuntimeError, ValueError) as error:  # another version of Ray or Python, or no machine of it
        first = (str(error).splitlines() or [""])[0]
        raise SettingError("trainer.ray.address", settings.address, f"cannot be joined: {first}") from None
    log.info("ray_joined", address=settings.address)


def _begin(settings: RaySettings, cpus: int) -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else Ray leaves one in the user's home
    # Where processes start slowly, Ray's own would take each other for dead.
    patience_ms = str(int(settings.start_timeout_s * 1000))
    for name in ("agent_register_timeout_ms", "worker_register_timeout_seconds"):
        patience = patience_ms if name.endswith("_ms") else str(int(settings.start_timeout_s))
        os.environ.setdefault(f"RAY_{name}", patience)
    Cluster._folder = tempfile.mkdtemp(prefix="hr-ray-")  # short: sockets are in it, and their paths are bounded
    _sweep(Path(Cluster._folder))
    end_s = time.monotonic() + settings.start_timeout_s
    while not _began(settings, cpus, Cluster._folder):
        if time.monotonic() > end_s:
            raise Unavailable(f"Ray has not started on this machine within {settings.start_timeout_s:g} s")
    log.info("ray_started", folder=Cluster._folder)


def _began(settings: RaySettings, cpus: int, folder: str) -> bool:
    """Ray itself waits for half a minute."""
    try:
        ray.init(
            address="local",
            num_cpus=cpus,
            include_dashboard=False,
            configure_logging=False,
            log_to_driver=False,
            object_store_memory=settings.object_store_bytes,
            _node_ip_address=_LOOPBACK,
            _temp_dir=folder,
        )
    except Exception as error:  # noqa: BLE001 (it raises plain `Exception`)
        log.warning("ray_did_not_start", error=str(error))
        ray.shutdown()
        return False
    return True


def _sweep(own: Path) -> None:
    """Mark our folder, and remove those whose process was killed, with what it has left behind."""
    (own / "pid").write_text(str(os.getpid()), encoding="ascii")
    for path in own.parent.glob("hr-ray-*/pid"):
        try:
            pid = path.read_text(encoding="ascii")
        except OSError:
            continue
        if Path("/proc/self").exists() and pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            _end_users(path.parent)
            shutil.rmtree(path.parent, ignore_errors=True)


def _end_users(folder: Path) -> None:
    """Processes with a file open in it: Ray's agents outlive a trainer that was killed."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            used = any(str(link.readlink()).startswith(f"{folder}/") for link in (process / "fd").iterdir())
            if used:
                os.kill(int(process.name), signal.SIGKILL)
        except OSError:  # somebody else's, or it has ended
            continue
