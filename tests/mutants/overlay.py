"""One changed file in front of an installed package, without a change of the checkout, for the imports of tests.

A folder that stands first on PYTHONPATH holds the package as links, and the changed file in the place of its link.
Subprocesses of tests inherit it.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]


@contextmanager
def overlaid(file: str, text: str) -> Iterator[str]:
    """The folder in which `file` (a path in the repository) reads `text`, for PYTHONPATH."""
    package, inside = split(file)
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        target = Path(folder) / package.name
        shutil.copytree(package, target, copy_function=_link, ignore=shutil.ignore_patterns("__pycache__"))
        changed = target / inside
        changed.unlink()
        changed.write_text(text, encoding="utf-8")
        yield folder


def split(file: str) -> tuple[Path, Path]:
    """Return the import package that `file` belongs to, and its path inside of it."""
    path = ROOT / file
    package = next(parent for parent in reversed(path.parents) if (parent / "__init__.py").exists())
    return package, path.relative_to(package)


def _link(source: str, target: str) -> None:
    Path(target).symlink_to(source)
