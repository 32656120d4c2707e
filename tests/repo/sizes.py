"""Print the sizes of the repository with their limits: `python -m tests.repo.sizes [REVISION]`."""

from __future__ import annotations

import io
import re
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tests.repo.deployments import ROOT

SETTING = re.compile(rb"^#?[a-z]\w* = ", re.MULTILINE)
TARGET = re.compile(rb"^[a-z][a-z-]*:.*## ", re.MULTILINE)


@dataclass(frozen=True)
class Size:
    """One measure of the repository with its limits, if it has any."""

    name: str
    value: float
    most: float | None = None
    least: float = 0

    @property
    def holds(self) -> bool:
        return self.most is None or self.least <= self.value <= self.most

    @property
    def limit(self) -> str:
        if self.most is None:
            return ""
        return f"{self.least:,.0f} to {self.most:,.0f}" if self.least else f"at most {self.most:,.0f}"


def tracked_files(revision: str) -> dict[str, bytes]:
    """Return the content of every tracked file of a revision by its path."""
    archive = subprocess.run(["git", "archive", revision], cwd=ROOT, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar if member.isfile()}  # type: ignore[union-attr]


def sizes(files: Mapping[str, bytes]) -> Iterator[Size]:
    """Yield the sizes of the repository."""
    python = {path: content.count(b"\n") for path, content in files.items() if path.endswith(".py")}
    sources = [
        lines for path, lines in python.items() if "/src/" in path and not path.endswith(("__init__.py", "__main__.py"))
    ]
    pages = [content for path, content in files.items() if path.endswith(".md")]
    client = [lines for path, lines in python.items() if path.startswith("packages/client/")]
    yield Size("tracked files", len(files), 1_500)
    yield Size("entries at the root", len({path.partition("/")[0] for path in files}), 28)
    yield Size("Python files", len(python), 1_150)
    yield Size("Python lines", sum(python.values()), 165_000)
    yield Size("source files", len(sources))
    yield Size("median lines of a source file", statistics.median(sources), 200, least=120)
    yield Size("source files below 40 lines", sum(lines < 40 for lines in sources))
    yield Size("test files", sum("/test_" in path for path in python))
    if client:
        yield Size("lines of the client", sum(client), 3_000)
    if (settings := files.get("deploy/headrace.toml")) is not None:
        yield Size("settings", len(SETTING.findall(settings)), 280)
    yield Size("targets of make", len(TARGET.findall(files["Makefile"])), 24)
    yield Size("decision records", sum(bool(re.match(r"docs/decisions/\d", path)) for path in files), 25)
    yield Size("words in pages", sum(len(page.decode().split()) for page in pages), 90_000)


def main() -> None:
    """Print one line for each size."""
    revision = sys.argv[1] if len(sys.argv) > 1 else "HEAD"
    for size in sizes(tracked_files(revision)):
        print(f"{size.name:32}{size.value:>9,.0f}  {size.limit:18}{'' if size.holds else 'exceeded'}".rstrip())


if __name__ == "__main__":
    main()
