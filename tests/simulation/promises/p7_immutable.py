"""P7: an announced version is complete, durable and equal to its digest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_runtime.errors import CorruptBlob, Unavailable
from headrace_runtime.storage.versions import read_manifest
from headrace_schemas import Checkpoint, Routing

if TYPE_CHECKING:
    from tests.simulation.cluster import Cluster
    from tests.simulation.promises.check import Check


def check(cluster: Cluster, that: Check) -> None:
    """Check the manifest and the digest of each file of every checkpoint and every routed version."""
    announced = {entry.version: entry.manifest for entry in cluster.log.all(Checkpoint)}
    served = {entry.version: entry.manifest for routing in cluster.log.all(Routing) for entry in routing.serve}
    for version, ref in [*announced.items(), *served.items()]:
        try:
            manifest = read_manifest(cluster.blobs, ref)
            for file in manifest.files:
                cluster.blobs.get(file.blob)
        except (CorruptBlob, Unavailable) as error:
            that(False, f"{version} was announced and cannot be read: {error}")
        else:
            that(manifest.version == version, f"{version} is really {manifest.version}")
    that(served.keys() <= announced.keys(), f"served and never published: {served.keys() - announced.keys()}")
