"""Packages for tests: from Maven and npm, one with entry points, the example on AgentScope Java, and a model hub.

`FakeHub` serves the real client huggingface_hub on loopback: repositories with commits, branches and LFS uploads. A
test can count its requests, take it offline, damage a file, or protect a repository by a token or a licence.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import queue
import shutil
import subprocess
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

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


Files = Mapping[str, bytes]


@dataclass
class HubRepository:
    """Repository of one model. `required_token` protects it, and `gated` requires a licence as well."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    required_token: str | None = None
    gated: bool = False

    def commit(self, files: Files, branch: str = "main") -> str:
        """Make `files` the content of a branch, and return the commit."""
        content = hashlib.sha1(usedforsecurity=False)
        for path, data in sorted(files.items()):
            content.update(f"{path}\0{hashlib.sha256(data).hexdigest()}\n".encode())
        commit = content.hexdigest()
        self.commits[commit] = dict(files)
        self.branches[branch] = commit
        return commit

    def find(self, revision: str) -> str | None:
        """Return the commit of a branch or commit, or None."""
        return revision if revision in self.commits else self.branches.get(revision)


class FakeHub:
    """Server of the hub. `address` is a value for `HF_ENDPOINT`."""

    def __init__(self) -> None:
        self.repositories: dict[str, HubRepository] = {}
        self.uploads: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.damaged: set[str] = set()
        """Paths whose served bytes differ from those of the commit."""
        hub = self

        class Handler(_Handler):
            def handle_one_request(self) -> None:
                self.hub = hub
                super().handle_one_request()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def add(self, name: str, folder: Path) -> str:
        """Publish the files of a folder as a commit of `main`, and return the commit."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return self.repositories.setdefault(name, HubRepository()).commit(files)

    @contextlib.contextmanager
    def running(self) -> Iterator[FakeHub]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub
    body: bytes

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the name of the base class)
        """Suppress the log of requests."""

    def do_HEAD(self) -> None:
        self._route()

    def do_GET(self) -> None:
        self._route()

    def do_POST(self) -> None:
        self._route()

    def do_PUT(self) -> None:
        digest = urlsplit(self.path).path.rpartition("/")[2]
        self.hub.uploads[digest] = self._read_body()
        self._send({})

    def _route(self) -> None:
        self.body = self._read_body()
        path = unquote(urlsplit(self.path).path).strip("/")
        self.hub.requests.append(f"{self.command} /{path}")
        parts = path.split("/")
        if path == "api/repos/create":
            self._create()
        elif parts[:2] == ["api", "models"] and len(parts) >= 6 and parts[4] == "revision":
            self._with("/".join(parts[2:4]), "/".join(parts[5:]), self._describe)
        elif parts[:2] == ["api", "models"] and len(parts) >= 6 and parts[4] == "preupload":
            self._choose_upload()
        elif parts[:2] == ["api", "models"] and len(parts) >= 6 and parts[4] == "commit":
            self._commit("/".join(parts[2:4]), "/".join(parts[5:]))
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._offer_uploads()
        elif len(parts) >= 5 and parts[2] == "resolve":
            self._with("/".join(parts[:2]), parts[3], self._file("/".join(parts[4:])))
        else:
            self._fail(HTTPStatus.NOT_FOUND, "EntryNotFound")

    def _with(self, name: str, revision: str, answer: object) -> None:
        """Call `answer` with the files of a commit, unless the repository or the revision is missing or hidden."""
        repository = self.hub.repositories.get(name)
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repository is None or (repository.required_token and token != repository.required_token):
            self._fail(HTTPStatus.UNAUTHORIZED, "RepoNotFound")
        elif repository.gated:
            self._fail(HTTPStatus.FORBIDDEN, "GatedRepo")
        elif (commit := repository.find(revision)) is None:
            self._fail(HTTPStatus.NOT_FOUND, "RevisionNotFound")
        else:
            assert callable(answer)
            answer(name, commit, repository.commits[commit])

    def _describe(self, name: str, commit: str, files: Files) -> None:
        siblings: list[dict[str, object]] = [{"rfilename": path, "size": len(data)} for path, data in files.items()]
        for entry, (path, data) in zip(siblings, files.items(), strict=True):
            if _is_large(path):
                entry["lfs"] = {"sha256": _sha256(data), "size": len(data), "pointerSize": 134}
        self._send({"id": name, "modelId": name, "sha": commit, "private": False, "siblings": siblings, "tags": []})

    def _file(self, path: str) -> object:
        def answer(name: str, commit: str, files: Files) -> None:
            if path not in files:
                self._fail(HTTPStatus.NOT_FOUND, "EntryNotFound")
                return
            data = files[path]
            headers = {"X-Repo-Commit": commit, "ETag": f'"{_sha256(data)}"', "X-Linked-Size": str(len(data))}
            if path in self.hub.damaged:
                data = bytes(len(data))
            self._send_bytes(data, headers)

        return answer

    def _create(self) -> None:
        requested = json.loads(self.body)
        name = (
            f"{requested['organization']}/{requested['name']}" if requested.get("organization") else requested["name"]
        )
        if not self.headers.get("Authorization"):
            self._fail(HTTPStatus.UNAUTHORIZED, "")
        elif name in self.hub.repositories:
            self._send({"url": f"{self.hub.address}/{name}"}, HTTPStatus.CONFLICT)
        else:
            self.hub.repositories[name] = HubRepository()
            self._send({"url": f"{self.hub.address}/{name}"})

    def _choose_upload(self) -> None:
        files = json.loads(self.body)["files"]
        modes = {file["path"]: "lfs" if _is_large(file["path"]) else "regular" for file in files}
        self._send(
            {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}
        )

    def _offer_uploads(self) -> None:
        objects = json.loads(self.body)["objects"]
        offered = [
            {**entry, "actions": {"upload": {"href": f"{self.hub.address}/upload/{entry['oid']}", "header": {}}}}
            for entry in objects
        ]
        self._send({"transfer": "basic", "objects": offered})

    def _commit(self, name: str, branch: str) -> None:
        repository = self.hub.repositories[name]
        present = repository.branches.get(branch)
        files = dict(repository.commits[present]) if present else {}
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploads[value["oid"]]
        commit = repository.commit(files, branch)
        self._send({"success": True, "commitOid": commit, "commitUrl": f"{self.hub.address}/{name}/commit/{commit}"})

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _send(self, content: object, status: HTTPStatus = HTTPStatus.OK) -> None:
        self._send_bytes(json.dumps(content).encode(), {"Content-Type": "application/json"}, status)

    def _fail(self, status: HTTPStatus, code: str) -> None:
        self._send_bytes(b'{"error": "refused"}', {"X-Error-Code": code} if code else {}, status)

    def _send_bytes(self, data: bytes, headers: Mapping[str, str], status: HTTPStatus = HTTPStatus.OK) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _is_large(path: str) -> bool:
    return path.endswith(".safetensors")
