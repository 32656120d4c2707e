"""A blob store that is slow, or that fails: files below `blobs/` take long or cannot be opened, for a while."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from tests.chaos import blob_faults
from tests.chaos.balancer import Balancer
from tests.chaos.nemeses.base import Nemesis

FOR_S = (2.0, 10.0)
KINDS = {"slow": {"delay_s": 1.0}, "failing": {"fail": 0.5}, "away": {"fail": 1.0}}


class BlobTrouble(Nemesis):
    """`tests/chaos/blob_faults/sitecustomize.py` runs in every service and reads its instructions from a file."""

    name: ClassVar[str] = "blobs"

    @classmethod
    def victims(cls, bus: str) -> Sequence[str]:
        return tuple(KINDS)

    def prepare(self, machine: str) -> Mapping[str, str]:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text("{}")
        return {"PYTHONPATH": str(Path(blob_faults.__file__).parent), "CHAOS_BLOBS": str(self._file)}

    async def strike(self, victim: str, balancer: Balancer, choose: random.Random) -> str:
        for_s = choose.uniform(*FOR_S)
        self._file.write_text(json.dumps(KINDS[victim]))

        async def mend() -> None:
            await asyncio.sleep(for_s)
            self._file.write_text("{}")

        for task in self._lasting.values():
            task.cancel()
        await asyncio.gather(*self._lasting.values(), return_exceptions=True)
        self._lasting.clear()
        self.lasting(victim, mend())
        return f"is what the blob store is for {for_s:.1f} s"

    @property
    def _file(self) -> Path:
        return self.stack.folder / "blob-faults.json"
