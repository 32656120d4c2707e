"""A private PostgreSQL server, run from the installed binaries of Debian or another distribution."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from tests.support.processes import free_port, must_run, wait_until


def _binaries() -> Path | None:
    initdb = shutil.which("initdb")
    candidates = [Path(initdb).parent] if initdb else []
    candidates += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next(
        (folder for folder in candidates if (folder / "initdb").exists() and (folder / "postgres").exists()), None
    )


def missing() -> str | None:
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
