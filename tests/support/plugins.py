"""A third-party package with entry points, written to a folder as an installer would."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def install(folder: Path, name: str, announces: Mapping[str, Mapping[str, str]], **modules: str) -> None:
    """Write the distribution `name` 1.0 to `folder`, which must be on `sys.path`.

    Args:
        announces: entry points, as `module:object` by group and name.
        modules: source code by module name.
    """
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = [line for group, names in announces.items() for line in (f"[{group}]", *(_entries(names)))]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source, encoding="utf-8")


def _entries(names: Mapping[str, str]) -> list[str]:
    return [f"{name} = {value}" for name, value in names.items()]
