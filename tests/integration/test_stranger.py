"""Tests of installed packages: an extension of another package on a stack, and the built wheels in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.request
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from openai import OpenAI

from headrace import Client
from headrace_runtime.settings.sections import complete
from headrace_schemas import Checkpoint, Experience
from headrace_schemas.http.stack_access import key_for
from headrace_trainer.settings import TrainerSettings
from tests.repo.test_make import PROJECTS, project
from tests.support import packages, tiny_model
from tests.support.processes import wait_until
from tests.support.service_process import HEADRACE, HeadraceUp
from tests.support.tiny_model import OPENING, conversation, encoder, user_message
from tests.unit.trainer.conftest import SMALL
from tests.unit.trainer.world import World

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "tests" / "stranger"
SAYS = 'hmm, who was it?\nI look: [[lookup {"who": "Ada"}]]'
TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}
SETTINGS = """
[echo]
kept_max = 3
[inference]
engine = "parrot"
tool_parser = "brackets"
reasoning_parser = "hmm"
[inference.parrot]
says = {says}
[scorer]
functions = ["calls"]
[trainer]
base = "{base}"
model = "bird"
algorithm = "half"
backend = "counted"
batch_experiences = 2
batch_experiences_min = 1
batch_wait_s = 1.0
steps_per_version = 1
[trainer.advantage.above]
level = 0.25
[trainer.counted]
already = 1000
[registry]
poll_s = 0.5
"""
UV = str(Path(sys.prefix) / "bin" / "uv")
COMMAND = {
    "headrace-schemas", "headrace-statistics", "headrace-runtime", "headrace-client", "headrace-operations",
    "headrace-integrations", "headrace-cli",
}  # fmt: skip
WITH_TORCH = {"headrace-trainer", "headrace-inference", "headrace-demo"}


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which the package is installed in a folder on the path, as by `pip install --target`."""
    folder = tmp_path_factory.mktemp("stranger")
    shutil.copytree(SOURCE, folder / "source")
    command = [str(Path(sys.executable).with_name("uv")), "pip", "install", "--quiet", "--offline", "--no-deps"]
    command += ["--no-build-isolation", "--python", sys.executable, "--target", str(folder / "site")]
    subprocess.run([*command, str(folder / "source")], check=True, timeout=120)
    return {**os.environ, "PYTHONPATH": str(folder / "site"), "COLUMNS": "200"}


def run(environ: dict[str, str], *arguments: str) -> str:
    command = [HEADRACE, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240, env=environ)
    assert process.returncode == 0, f"{process.stdout}{process.stderr}"
    return process.stdout


def get(url: str) -> str:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key_for(url)}"})
    with urllib.request.urlopen(request, timeout=10) as response:
        text: str = response.read().decode()
    return text


def test_nothing_of_ours_knows_the_package() -> None:
    words = re.compile(r"headrace_stranger|\bparrot\b|\bEchoSettings\b")
    tooling = "pyproject.toml"  # it says how the package's own tests are type-checked
    listed = subprocess.run(["git", "ls-files", "*.py", "*.toml"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / line for line in listed.stdout.splitlines() if not line.startswith("tests/") and line != tooling]
    assert [path for path in files if path.exists() and words.search(path.read_text(encoding="utf-8"))] == []


def test_the_reference_knows_what_is_installed(environ: dict[str, str]) -> None:
    text = run(environ, "config", "reference")
    sections = tomllib.loads(re.sub(r"^#(?=\w+ = (?!\.\.\.$))", "", text, flags=re.MULTILINE))
    assert sections["echo"]["port"] == 8090
    assert sections["echo"]["kept_max"] == 10
    assert sections["inference"]["parrot"] == {"says": "hello"}
    assert sections["trainer"]["advantage"]["above"] == {"level": 0.0}
    assert sections["trainer"]["counted"] == {"already": 0}
    names = (
        '"counted" or "ray" or "torch" or "trinity"',
        '"parrot" or "torch" or "vllm"',
        '"gspo" or "half" or "heed" or "hindsight" or "kto"',
        '"brackets" or "hermes" or "none"',
        '"hmm" or "none" or "think"',
    )
    assert [name for name in names if name not in " ".join(text.replace("\n#", "").split())] == []


async def test_an_algorithm_of_the_package_reads_replies_and_trains_the_answers(
    tmp_path: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(environ["PYTHONPATH"])
    base = tiny_model.build(tmp_path / "base", layers=1)
    table = {"base": str(base), **SMALL, "algorithm": "heed", "batch_experiences": 3, "batch_wait_s": 5.0}
    settings, world, encode = complete(TrainerSettings).model_validate(table), World(tmp_path), encoder(base)
    await world.run(settings)
    version = world.bus.checkpoints[0].version
    words = ("No, it is K.", "Thanks. That is what I was looking for.", "Which one?")
    assert [len(encode(user_message(text) + OPENING)) > 40 for text in words[:2]] == [False, True]
    for number, text in enumerate(words):
        event = conversation(encode, number, version, first="B", second="K", reply=text, reward=None)
        world.bus.produce(event)
    await world.run(settings, wait_s=6)
    outcomes = {outcome.experience_id: outcome for outcome in world.bus.verdicts}
    advantages = {
        name: [(turn.turn_id, turn.advantage) for turn in outcome.turn_advantages] for name, outcome in outcomes.items()
    }
    assert advantages == {"e0": [("turn-0-0", -0.25)], "e1": [("turn-1-0", 0.5)], "e2": []}
    assert (outcomes["e2"].dropped, outcomes["e2"].detail) == ("no_reward", "no_signal")
    assert [batch.experiences for account in world.bus.accounts for batch in account.batches] == [2]


DEAF = """
from headrace_trainer.algorithms.advantages import Advantages
from headrace_trainer.algorithms.estimators import estimator
from headrace_trainer.algorithms.presets import REPLIES, Needs
from headrace_trainer.algorithms.presets import Algorithm

@estimator(Needs(hindsight=True), signals=REPLIES)
def deaf(batch, past, decay, settings):
    raise AssertionError("the built-in teacher computes the advantages, so this is never called")

DEAF = Algorithm("deaf")
"""


def test_planted_an_algorithm_whose_compute_is_not_called_is_refused_by_name(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    announced = {"headrace.advantages": {"deaf": "deaf:deaf"}, "headrace.algorithms": {"deaf": "deaf:DEAF"}}
    packages.install(tmp_path / "site", "deaf", announced, deaf=DEAF)
    config = tmp_path / "headrace.toml"
    path = os.pathsep.join([str(tmp_path / "site"), environ["PYTHONPATH"]])
    base = tiny_model.build(tmp_path / "base", layers=1)
    outputs = {}
    for algorithm in ("heed", "deaf"):
        config.write_text(f'[trainer]\nbase = "{base}"\nalgorithm = "{algorithm}"\n', encoding="utf-8")
        command = [sys.executable, "-m", "headrace_trainer", "--check", "--config", str(config)]
        process = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=120, env={**environ, "PYTHONPATH": path}
        )
        outputs[algorithm] = " ".join(f"{process.stdout}{process.stderr}".split())
        assert bool(process.returncode) == (algorithm == "deaf"), outputs[algorithm]
    refusal = (
        "trainer.advantage.kind = 'deaf': its `compute` would never be called with these signals and needs; declare"
    )
    assert refusal in outputs["deaf"]
    assert "trainer.advantage" not in outputs["heed"], outputs["heed"]


@pytest.fixture
def up(tmp_path: Path, environ: dict[str, str]) -> Iterator[HeadraceUp]:
    base = tiny_model.build(tmp_path / "base")
    config = tmp_path / "headrace.toml"
    config.write_text(SETTINGS.format(base=base, says=json.dumps(SAYS)), encoding="utf-8")
    stack = HeadraceUp(tmp_path / "data", config, {}, environ)
    stack.start()
    yield stack
    stack.stop()


@pytest.mark.long
@pytest.mark.timeout(600)
def test_up_runs_all_of_it(up: HeadraceUp, environ: dict[str, str]) -> None:
    assert up.status()["alive"]["echo"] == "yes"  # type: ignore[index]
    echo, gateway = up.state.services["echo"], up.state.services["gateway"]
    for number in range(2):
        with Client(gateway.url) as client, client.session(task_id=f"task {number}") as session:
            answer = OpenAI(base_url=session.base_url, api_key="none").chat.completions.create(
                model="bird",
                messages=[{"role": "user", "content": f"Who wrote mail {number}?"}],
                tools=[TOOL],  # type: ignore[list-item]
            )
            calls = [call for call in answer.choices[0].message.tool_calls or () if call.type == "function"]
            assert [(call.function.name, call.function.arguments) for call in calls] == [("lookup", '{"who": "Ada"}')]
            assert (answer.choices[0].message.content or "").strip() == "I look:"
            session.feedback(1.0)

    def echoed() -> bool:
        return bool(json.loads(get(f"{echo.url}/last"))["last"] == ["I look: "] * 2)

    wait_until(echoed, 60, "echo has heard both turns")
    assert json.loads(get(f"{echo.url}/last"))["gateway_url"] == f"{gateway.url}/v1"
    assert "headrace_echo_heard_total 2.0" in get(f"{echo.url}/metrics")
    info = 'headrace_inference_engine_info{engine="parrot",reasoning_parser="hmm",tool_parser="brackets"} 1.0'
    assert info in get(f"{up.state.services['inference'].url}/metrics")
    info = 'headrace_trainer_algorithm_info{advantage="above",algorithm="half",backend="counted",loss="slope"} 1.0'
    assert info in get(f"{up.state.services['trainer'].url}/metrics")

    def trained() -> bool:
        return len(run(environ, "replay", "events", Checkpoint.topic, "--data-dir", str(up.folder)).splitlines()) > 1

    wait_until(trained, 120, "a version was trained")
    assert "headrace_counted_rows_total 1002.0" in get(f"{up.state.services['trainer'].url}/metrics")
    (experience, *_) = run(environ, "replay", "events", Experience.topic, "--data-dir", str(up.folder)).splitlines()
    assert "function:calls" in experience
    table = run(environ, "status", "--data-dir", str(up.folder))
    assert re.search(r"echo\s+ready", table), table
    assert up.stop() == 0


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


@pytest.mark.long
@pytest.mark.timeout(900)
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


@pytest.mark.long
@pytest.mark.timeout(900)
def test_product_without_torch_starts_its_services_and_stops_with_status_0(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    installed = install(wheels, wheels.keys() - WITH_TORCH, tmp_path)
    tuner = installed.run("python -c 'from headrace.tuner import tune; from headrace.jobs import Job; print(tune)'")
    assert tuner.returncode == 0, tuner.stderr
    status, output = installed.interrupt_once("headrace up --auto-ports", is_up)
    assert status == 0, output
    assert "inference is not installed here; pip install 'headrace[local]' adds it" in output


@pytest.mark.long
@pytest.mark.timeout(900)
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
