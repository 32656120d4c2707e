"""Kinds of faults, one file each. `NEMESES` lists them; `missing` returns the reason why one cannot strike here."""

from __future__ import annotations

from collections.abc import Mapping

from tests.chaos.nemeses import blobs, clock, disk, kill, partition, postgres, stop
from tests.chaos.nemeses.base import Nemesis

NEMESES: Mapping[str, type[Nemesis]] = {
    nemesis.name: nemesis
    for nemesis in (
        kill.Kill,
        stop.Stop,
        partition.Partition,
        clock.Clock,
        disk.DiskFull,
        postgres.KillPostgres,
        blobs.BlobTrouble,
    )
}
