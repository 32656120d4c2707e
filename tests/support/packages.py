"""Packages for tests: from Maven and npm, one with entry points, and the example on AgentScope Java."""

from __future__ import annotations

import queue
import shutil
import subprocess
import threading
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from filelock import FileLock

from headrace.topics import Range, connected
from headrace_schemas import Experience, TrainingMetrics, Trajectory

ROOT = Path(__file__).resolve().parents[2]
NODE_FOLDER = ROOT / ".cache" / "producers"


def missing_jars(pom: Path, folder: Path, description: str, *programs: str) -> str | None:
    """Return why the dependencies of the pom cannot be put into `folder`, or None if they are there.

    The first call, and the first one after a change of the pom, downloads them.
    """
    for program in ("java", "mvn", *programs):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    folder.parent.mkdir(exist_ok=True)
    with FileLock(f"{folder}.lock"):
        complete = folder / "complete"
        if not complete.exists() or complete.read_text() != pom.read_text():
            command = ["mvn", "-q", "-B", "-f", str(pom), "dependency:copy-dependencies", "-DincludeScope=runtime"]
            result = subprocess.run(
                [*command, f"-DoutputDirectory={folder}"], capture_output=True, text=True, check=False
            )
            if result.returncode:
                return f"Maven could not fetch {description}: {result.stdout[-300:]}"
            complete.write_text(pom.read_text())
    return None


def missing_node_client() -> str | None:
    """Return why the example cannot run here, or None. The first call downloads kafkajs."""
    for program in ("node", "npm"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    NODE_FOLDER.parent.mkdir(exist_ok=True)
    with FileLock(f"{NODE_FOLDER}.lock"):
        return _fetch_node_client()


def _fetch_node_client() -> str | None:
    shutil.copytree(ROOT / "examples" / "producers", NODE_FOLDER, dirs_exist_ok=True)
    if not (NODE_FOLDER / "node" / "node_modules" / "kafkajs").exists():
        command = ["npm", "install", "--no-audit", "--no-fund", "--silent"]
        process = subprocess.run(command, cwd=NODE_FOLDER / "node", capture_output=True, text=True, check=False)
        if process.returncode:
            return f"npm could not fetch kafkajs: {process.stderr[-300:]}"
    return None


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


EXAMPLE = ROOT / "examples" / "java_agent"
JARS = ROOT / ".cache" / "agentscope-java-1.0.9"
_QUICK = ("-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx384m")
_QUIET = ("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",)


def missing_java_agent() -> str | None:
    """Return why the example cannot run here, or None. The first call downloads 36 MB."""
    return missing_jars(EXAMPLE / "pom.xml", JARS, "AgentScope", "javac")


def compiled(folder: Path) -> Path:
    """Compile the example's classes into `folder`. Raises `AssertionError` with the compiler's output."""
    sources = sorted(str(path) for path in (EXAMPLE / "src").rglob("*.java"))
    command = ["javac", "-Xlint:all", "-Werror", "-d", str(folder), "-cp", f"{JARS}/*", *sources]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return folder


class JavaAgent:
    """Process of the example. At the end of the `with` block its input is closed, so that it commits once more and
    exits.
    """

    def __init__(self, classes: Path, *words: str) -> None:
        self._command = ["java", *_QUICK, *_QUIET, "-cp", f"{classes}:{JARS}/*", "headrace.examples.OrderAgent", *words]
        self._lines: queue.Queue[str] = queue.Queue()
        self.errors: list[str] = []
        """Lines of the agent's log."""

    def line(self, kind: str, timeout_s: float) -> str:
        """Return the next output line, which must be of this kind. Raises `AssertionError` with the log otherwise."""
        try:
            name, _, text = self._lines.get(timeout=timeout_s).partition("\t")
        except queue.Empty:
            raise AssertionError(f"no {kind} after {timeout_s:g} s:\n{''.join(self.errors[-40:])}") from None
        assert name == kind, f"{name} {text} in place of {kind}:\n{''.join(self.errors[-40:])}"
        return text.rstrip("\n")

    def __enter__(self) -> Self:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        for stream, keep in ((self._process.stdout, self._lines.put), (self._process.stderr, self.errors.append)):
            threading.Thread(target=lambda s=stream, k=keep: [k(text_line) for text_line in s], daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
            if kind is None:
                self.line("stopped", 30)
        finally:
            self._process.kill()
            self._process.wait()


Runs = dict[str, dict[str, int]]
"""Number of calls by task id and run id."""


async def trained_runs(bus: str) -> Runs:
    """Return all calls of every trained run. Runs without a task are under an empty task id."""
    trained: set[str] = set()
    async with connected(bus) as topics:
        events = [entry.event async for entry in topics.read(Range(Trajectory.topic))]
        async for entry in topics.read(Range(TrainingMetrics.topic)):
            if isinstance(entry.event, TrainingMetrics):
                trained |= {verdict.experience_id for verdict in entry.event.verdicts if verdict.dropped is None}
    runs: Runs = defaultdict(dict)
    for run in (event for event in events if isinstance(event, Trajectory)):
        if all(Experience.id_of(run.trajectory_id, branch) in trained for branch in range(len(run.branches))):
            runs[run.task_id or ""][run.run_id or ""] = len(run.turn_ids)
    return dict(runs)
