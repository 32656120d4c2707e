"""Clients of our own services ignore the proxies of the environment, which would see their keys."""

from __future__ import annotations

import ast
import subprocess

import pytest

from headrace.client import Client
from headrace.registry import ModelRegistry
from tests.repo.compose_files import ROOT
from tests.unit.cli.http_fake import HttpFake

CLIENTS = {"Client", "AsyncClient", "get", "post", "request", "stream"}
CLIENTS |= {"DefaultHttpxClient", "DefaultAsyncHttpxClient"}
LIBRARIES = {"httpx", "httpx2", "openai"}
NOT_OURS = {
    "services/judge/src/headrace_judge/endpoint.py": "a judge's endpoint is anywhere; not where it is a gateway"
}


def test_every_client_ignores_proxies() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = ("packages/", "services/", "gateway/", "examples/", "tests/support/")
    wrong = []
    for path in (path for path in listed.split() if path.startswith(folders)):
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            library, _, function = name.rpartition(".")
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            opens = (library in LIBRARIES and function in CLIENTS) or name == "DefaultAsyncHttpxClient"
            direct = words.get("trust_env") == "False" or "MockTransport" in words.get("transport", "")
            if (
                name in ("urllib.request.urlopen", "aiohttp.request")
                or words.get("trust_env") == "True"
                or (opens and not direct and path not in NOT_OURS)
            ):
                wrong.append(f"{path}:{node.lineno}")
    assert wrong == []


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "nonsense://x", "127.0.0.1"])
def test_a_proxy_of_the_environment_changes_nothing(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, proxy)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    fake = HttpFake()
    try:
        fake.answer("GET", "/v1/models", {"object": "list", "data": []})
        with ModelRegistry(fake.url) as registry:
            assert registry.models() == ()
        Client(fake.url).close()
    finally:
        fake.stop()
