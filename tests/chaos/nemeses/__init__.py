"""What can go wrong, one file each. `NEMESES` is the list; `missing` says why one cannot be played here."""

from __future__ import annotations

from collections.abc import Mapping

from tests.chaos.nemeses import blobs, clock, disk, kill, partition, postgres, stop
from tests.chaos.nemeses.base import Nemesis

NEMESES: Mapping[str, type[Nemesis]] = {
    one.name: one
    for one in (
        kill.Kill,
        stop.Stop,
        partition.Partition,
        clock.Clock,
        disk.DiskFull,
        postgres.KillPostgres,
        blobs.BlobTrouble,
    )
}
