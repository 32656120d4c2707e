"""Prints the sizes of the repository: `python -m tests.repo.sizes [REVISION]`."""

from __future__ import annotations

import io
import re
import statistics
import subprocess
import sys
import tarfile

from tests.repo.compose_files import ROOT


def tracked_files(revision: str) -> dict[str, bytes]:
    """Return the content of every tracked file of a revision by its path."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}  # type: ignore[union-attr]


def sizes(files: dict[str, bytes]) -> dict[str, int]:
    """Return the sizes of the repository by name."""
    python = {path: content.count(b"\n") for path, content in files.items() if path.endswith(".py")}
    sources = [
        lines for path, lines in python.items() if "/src/" in path and not path.endswith(("__init__.py", "__main__.py"))
    ]
    pages = [content.decode() for path, content in files.items() if path.endswith(".md")]
    return {
        "tracked files": len(files),
        "entries at the root": len({path.partition("/")[0] for path in files}),
        "Python files": len(python),
        "Python lines": sum(python.values()),
        "source files": len(sources),
        "median lines of a source file": round(statistics.median(sources)),
        "source files below 40 lines": sum(lines < 40 for lines in sources),
        "test files": sum("/test_" in path for path in python),
        "words in pages": sum(len(re.findall(r"\S+", page)) for page in pages),
    }


def main() -> None:
    """Print one line for each size."""
    revision = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    for name, size in sizes(tracked_files(revision)).items():
        print(f"{name:32}{size:>9,}")


if __name__ == "__main__":
    main()
