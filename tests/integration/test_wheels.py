"""Tests of the built wheels in environments without the rest of the repository, used in an empty folder."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from tests.repo.test_make import PROJECTS, project

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
UV = str(Path(sys.prefix) / "bin" / "uv")
COMMAND = {
    "headrace-schemas", "headrace-statistics", "headrace-runtime", "headrace-client", "headrace-operations",
    "headrace-integrations", "headrace-cli",
}  # fmt: skip
WITH_TORCH = {"headrace-trainer", "headrace-inference", "headrace-demo"}


@dataclass(frozen=True)
class Installed:
    """Environment with some of the wheels, and an empty folder in which its programs run."""

    prefix: Path
    folder: Path

    @property
    def environ(self) -> dict[str, str]:
        variables = {name: value for name, value in os.environ.items() if not name.startswith(("HEADRACE", "PYTHON"))}
        return {**variables, "PATH": f"{self.prefix / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    def run(self, command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, shell=True, cwd=self.folder, env=self.environ, capture_output=True, text=True,
            timeout=timeout_s, check=False,
        )  # fmt: skip

    def interrupt_once(self, command: str, is_ready: Callable[[str], bool], timeout_s: float = 240) -> tuple[int, str]:
        """Run a command, send Ctrl-C once its output is ready, and return its exit status and its output."""
        log = self.folder / "output.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["sh", "-c", f"exec env {command}"], cwd=self.folder, env=self.environ, stdout=output, stderr=output
            )
        try:
            deadline = time.monotonic() + timeout_s
            while not is_ready(log.read_text(encoding="utf-8")):
                assert process.poll() is None, log.read_text(encoding="utf-8")
                assert time.monotonic() < deadline, log.read_text(encoding="utf-8")
                time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            return process.wait(120), log.read_text(encoding="utf-8")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the wheel of each distribution from its source archive, and return the wheels by name."""
    folder = tmp_path_factory.mktemp("dist")
    for path in PROJECTS:
        build = [UV, "build", "--quiet", "--no-build-isolation", "--python", sys.executable, "--out-dir", str(folder)]
        subprocess.run([*build, str(path.parent)], check=True)
    names = {project(path)["name"] for path in PROJECTS}
    return {name: next(folder.glob(f"{name.replace('-', '_')}-[0-9]*.whl")) for name in names}


def install(wheels: dict[str, Path], names: Collection[str], folder: Path) -> Installed:
    """Install some wheels. Third-party packages are links to those of this environment."""
    prefix, packages = folder / "env", folder / "packages"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", prefix], check=True)
    packages.mkdir()
    for site in {path for path in sys.path if path.endswith("site-packages")}:
        for entry in Path(site).iterdir():
            if not entry.name.startswith(("headrace", "_editable", "_headrace")) and entry.suffix != ".pth":
                (packages / entry.name).symlink_to(entry)
    install = [UV, "pip", "install", "--quiet", "--no-deps", "--no-index", "--python", str(prefix / "bin" / "python")]
    subprocess.run([*install, *(str(wheels[name]) for name in names)], check=True)
    (site_packages,) = prefix.glob("lib/python*/site-packages")
    (site_packages / "others.pth").write_text(f"{packages}\n")
    (folder / "empty").mkdir()
    return Installed(prefix, folder / "empty")


def is_up(output: str) -> bool:
    return "Ctrl-C stops everything" in output


def serves_the_agent(output: str) -> bool:
    """Return whether the gateway that `headrace up` printed serves a version of the demo's model."""
    base_url = re.search(r"base_url +(\S+)", output)
    try:
        return base_url is not None and urlopen(f"{base_url[1]}/models/email-agent").status == 200
    except URLError:
        return False


def test_up_without_a_service_exits_2_and_names_the_extra(wheels: dict[str, Path], tmp_path: Path) -> None:
    installed = install(wheels, COMMAND, tmp_path)
    up = installed.run("headrace up")
    assert up.returncode == 2, up.stdout + up.stderr
    assert "pip install 'headrace[local]'" in up.stderr
    version = installed.run("headrace --version")
    assert re.fullmatch(r"headrace \d+\.\d+\.\d+\n", version.stdout)
    demo = installed.run("headrace demo")
    assert demo.returncode == 2
    assert "pip install 'headrace[local]'" in demo.stderr


def test_product_without_torch_starts_its_services_and_stops_with_status_0(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    installed = install(wheels, wheels.keys() - WITH_TORCH, tmp_path)
    tuner = installed.run("python -c 'from headrace.tuner import tune; from headrace.jobs import Job; print(tune)'")
    assert tuner.returncode == 0, tuner.stderr
    status, output = installed.interrupt_once("headrace up --auto-ports", is_up)
    assert status == 0, output
    assert "inference is not installed here; pip install 'headrace[local]' adds it" in output


def test_demo_runs_from_wheels_and_prints_commands_that_work(wheels: dict[str, Path], tmp_path: Path) -> None:
    installed = install(wheels, wheels.keys(), tmp_path)
    demo = installed.run("headrace demo --short --seed 0", timeout_s=600)
    assert "held-out success" in demo.stdout, demo.stdout + demo.stderr
    assert (installed.folder / "reports" / "demo.json").is_file()
    assert (installed.folder / ".headrace" / "demo" / "logs").is_dir()
    commands = [line.strip() for line in demo.stdout.splitlines() if line.startswith("  ")][-3:]
    serve, *later_commands = commands
    assert all(str(installed.prefix / "bin" / "headrace") in command for command in commands), demo.stdout
    for command in later_commands:
        followed = installed.run(command)
        assert followed.returncode == 0, f"{command}: {followed.stderr}"
        assert followed.stdout
    status, output = installed.interrupt_once(serve, serves_the_agent)
    assert status == 0, output
    assert shlex.split(serve)[1].startswith(str(installed.prefix))
