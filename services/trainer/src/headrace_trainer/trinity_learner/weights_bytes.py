"""Weights files as one sequence of bytes: a line with the lineage, a line with names and sizes, and the contents."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from headrace_runtime.errors import SettingError

_WORD = b"headrace trinity weights of lineage "


def pack_weights(lineage: str, weights: Sequence[Path]) -> bytes:
    """Return the files as bytes. Equal files give equal bytes."""
    ordered = sorted(weights, key=lambda path: path.name)
    names = json.dumps([[path.name, path.stat().st_size] for path in ordered])
    return b"".join([_WORD, lineage.encode(), b"\n", names.encode(), b"\n", *(path.read_bytes() for path in ordered)])


def unpack_weights(data: bytes, folder: Path) -> None:
    """Write the files into `folder`. Raise `SettingError` when `data` has another format."""
    if not data.startswith(_WORD):
        raise SettingError("trainer.backend", "trinity", "the lineage was saved by another back end; keep that one")
    first = data.index(b"\n") + 1
    start = data.index(b"\n", first) + 1
    for name, size in json.loads(data[first:start]):
        if Path(name).name != name:
            raise SettingError("trainer.backend", "trinity", f"the saved lineage names a file {name!r}")
        (folder / name).write_bytes(data[start : start + size])
        start += size
