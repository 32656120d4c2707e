"""Small Headrace that is started as in the README, with the README's settings and reward functions and a tiny base
model."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.docs.fences import ROOT, Fence, fences
from tests.support import tiny_model
from tests.support.service_process import HeadraceUp

MODEL = "my-agent"
BATCH = 4
_SHOWN_URL = "http://127.0.0.1:8000"
_SMALL = {
    "inference.torch.device": "cpu",
    "inference.heartbeat_s": 0.5,
    "trainer.batch_experiences": BATCH,
    "trainer.batch_experiences_min": BATCH,
    "trainer.steps_per_version": 1,
    "trainer.optimizer.learning_rate": 0.003,
    "trainer.compute.device": "cpu",
}
_FENCE_TIMEOUT_S = 240.0


class Folder:
    """Folder in which fences run: `headrace` and `python` are the repository's, and the gateway has its actual port."""

    def __init__(self, path: Path, gateway: str = _SHOWN_URL) -> None:
        self.path = path
        self.gateway = gateway

    def add_files(self, page: Path) -> None:
        """Write the fences of the page that are files."""
        for fence in fences(page):
            if fence.file is not None:
                target = self.path / fence.file
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_text(fence.text, encoding="utf-8")

    def run(self, fence: Fence) -> str:
        """Run the fence and return its output. Raises `AssertionError` with the output when it fails."""
        text = fence.text.replace(_SHOWN_URL, self.gateway)
        command = (
            [sys.executable, "-c", text] if fence.language == "python" else ["bash", "-euo", "pipefail", "-c", text]
        )
        environ = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        process = subprocess.run(
            command, cwd=self.path, env=environ, capture_output=True, text=True, timeout=_FENCE_TIMEOUT_S, check=False
        )
        assert process.returncode == 0, (
            f"{fence.label} ended with {process.returncode}:\n{process.stdout}\n{process.stderr}"
        )
        return process.stdout


class Stack(Folder):
    """Folder of a running Headrace."""

    def __init__(self, path: Path, up: HeadraceUp) -> None:
        super().__init__(path, up.base_url.removesuffix("/v1"))
        self.bus = up.state.bus


@contextlib.contextmanager
def running(path: Path) -> Iterator[Stack]:
    """Start Headrace for the duration of the context. At the end, stop all services and check that they stopped
    cleanly."""
    Folder(path).add_files(ROOT / "README.md")
    tiny_model.build(path / "models" / "base")
    up = HeadraceUp(path / ".headrace", path / "headrace.toml", _SMALL, {})
    with contextlib.chdir(path):
        up.start()
    try:
        yield Stack(path, up)
    finally:
        status = up.stop()
    assert status == 0, up.log
