"""A full disk: machine A's data lie on a small file system, which is filled to its last page."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from tests.chaos.balancer import Balancer
from tests.chaos.nemeses.base import Nemesis

SIZE_MIB = 1536
FOR_S = (3.0, 15.0)
_CHUNK = 1 << 20


class DiskFull(Nemesis):
    """Fill the disk. This machine may refuse users' requests meanwhile; their load balancer chooses the other one."""

    name: ClassVar[str] = "disk-full"

    @classmethod
    def missing(cls, bus: str) -> str | None:
        if os.geteuid() != 0 or shutil.which("mount") is None:
            return "mounting a small file system needs root"
        return None

    @classmethod
    def victims(cls, bus: str) -> Sequence[str]:
        return ("a",)

    async def strike(self, victim: str, balancer: Balancer, choose: random.Random) -> str:
        for_s = choose.uniform(*FOR_S)
        await self.stack.spare_other_machine(victim)
        filler = self.stack.folder / victim / "filler"
        balancer.refusing(self.stack.url("gateway"))
        await asyncio.to_thread(fill, filler)

        async def empty() -> None:
            await asyncio.sleep(for_s)
            filler.unlink(missing_ok=True)
            await asyncio.sleep(5.0)  # what it refused meanwhile is on its way to the users
            balancer.refusing_no_more(self.stack.url("gateway"))

        self.lasting(victim, empty())
        return f"has no space left on its disk for {for_s:.1f} s"


@contextlib.contextmanager
def small_disk(folder: Path, size_mib: int = SIZE_MIB) -> Iterator[None]:
    """`folder` on a file system of its own while the body runs."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=0755", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(path: Path) -> None:
    """Take all free space, and then the space that was freed meanwhile."""
    with path.open("wb", buffering=0) as file:
        for size in (_CHUNK, 4096):
            with contextlib.suppress(OSError):
                while True:
                    _grow(file.fileno(), size)


def _grow(fd: int, size: int) -> None:
    os.lseek(fd, 0, os.SEEK_END)
    if os.write(fd, bytes(size)) < size:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
