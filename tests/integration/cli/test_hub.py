"""A base that is named on a model hub: fetched once, served, restarted without the hub, pushed, and fetched again."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

import httpx2
import pytest

from headrace_runtime.storage.base_files import ORIGIN_FILE
from tests.support import tiny_model
from tests.support.fake_hub import FakeHub
from tests.support.headrace_up import HEADRACE, HeadraceUp
from tests.support.ports import free_port

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
WAIT_S = 120.0
MODEL = "my-agent"


def run(arguments: list[str], environ: Mapping[str, str]) -> str:
    process = subprocess.run(
        [HEADRACE, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        env={**os.environ, **environ},
    )
    assert process.returncode == 0, f"{arguments}: {process.stdout}{process.stderr}"
    return process.stdout


def answering_version(up: HeadraceUp) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    version: str = httpx2.post(f"{up.base_url}/chat/completions", json=body, timeout=WAIT_S).json()["model"]
    return version


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_named_base_is_served_and_survives_the_hub(tmp_path: Path) -> None:
    base, config, data = tiny_model.build(tmp_path / "base"), tmp_path / "headrace.toml", tmp_path / "data"
    config.write_text("[registry]\npoll_s = 0.2\n")
    settings = {"trainer.base": "acme/tiny", "trainer.model": MODEL}
    home = {"HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "hf_any"}
    with FakeHub().running() as hub:
        commit = hub.add("acme/tiny", base)
        environ = {**home, "HF_ENDPOINT": hub.address}
        up = HeadraceUp(data, config, settings, environ)
        try:
            up.start()
            version = answering_version(up)
            run(["models", "export", version, str(tmp_path / "exported"), "--data-dir", str(data)], environ)
            pushed = run(["models", "push", version, "acme/back", "--data-dir", str(data)], environ)
        finally:
            up.stop()
        exported = files_of(tmp_path / "exported")
        assert json.loads(exported[ORIGIN_FILE]) == {"repository": "acme/tiny", "commit": commit}
        pushed_commit = hub.repositories["acme/back"].branches["main"]
        assert pushed_commit in pushed
        run(["models", "pull", "acme/back", "--data-dir", str(tmp_path / "other")], environ)
        assert files_of(tmp_path / "other/models/acme--back" / pushed_commit) == exported
    up = HeadraceUp(data, config, settings, {**home, "HF_ENDPOINT": f"http://127.0.0.1:{free_port()}"})
    try:
        up.start()
        assert answering_version(up) == version
    finally:
        up.stop()
