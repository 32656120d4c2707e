"""Commands of make that pages and messages name exist, and former names of targets still run what they ran."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.repo.compose_files import ROOT

COMMAND = re.compile(
    r"(?:`make |^(?:\$ )?make (?=[a-z-]+(?: [A-Z]+=.*|\s+#.*)?$))"
    r"([a-z][a-z-]*)((?: (?:NAME|GROUP)=(?:\"[^\"]+\"|[a-z][\w-]*))?)",
    re.MULTILINE,
)
NAMED_IN = ("*.md", ".ci/run", "*.yml", "pyproject.toml", "packages/*.py", "services/*.py", "tests/support/presence.py")
FORMER = {
    "attack": "check NAME=attack",
    "compose-test": "check NAME=compose",
    "test-jobs": "check NAME=jobs",
    "bench-bus": 'bench NAME="bus replay"',
    "bench-gate": "bench NAME=gate",
    "demo-swaps": "demo NAME=swaps",
    "example-math": "example NAME=math",
    "install-clients": "install GROUP=clients",
    "lock-images": "lock",
}
"""One former name of each rule to its present one."""


def named_commands() -> set[tuple[str, str]]:
    """Return target and name of every command of make in pages and messages; change logs keep former names."""
    command = ["git", "ls-files", *NAMED_IN, ":!*CHANGELOG*"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    return {match for path in listed for match in COMMAND.findall((ROOT / path).read_text(encoding="utf-8"))}


def dry_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "--dry-run", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(("target", "name"), sorted(named_commands()))
def test_a_command_that_is_named_exists_under_its_present_name(target: str, name: str) -> None:
    run = dry_run(target, *filter(None, [name.strip().replace('"', "")]))
    assert run.returncode == 0, run.stderr
    assert "is now:" not in run.stdout, run.stdout.splitlines()[0]


@pytest.mark.parametrize("former", FORMER)
def test_a_former_name_prints_the_present_one_and_runs_it(former: str) -> None:
    run = dry_run(former, "SEED=7")
    assert f"make {former} is now: make {FORMER[former]}\n" in run.stdout
    target, _, name = FORMER[former].partition(" ")
    assert dry_run(target, *filter(None, [name.replace('"', "")]), "SEED=7").stdout in run.stdout


@pytest.mark.parametrize("arguments", ["check", "check NAME=nothing", "bench NAME=nothing", "test-nothing"])
def test_an_unknown_name_is_refused_with_the_names_that_exist(arguments: str) -> None:
    run = dry_run(*arguments.split())
    assert run.returncode == 2
    assert "gate" in run.stderr or "attack" in run.stderr
