"""A model hub on loopback for the real client huggingface_hub: repositories with commits, branches and LFS uploads.

It serves the endpoints that a download and an upload need. A test can count its requests, take it offline, damage a
file, or protect a repository by a token or a licence.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

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
