"""helm and kubectl accept the commands of docs/guides/kubernetes.md and of the chart's README."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.docs.fences import fences
from tests.repo.compose_files import ROOT
from tests.repo.helm.chart import BIN, CHART, values
from tests.repo.helm.schemas import VERSIONS

PAGE = ROOT / "docs/guides/kubernetes.md"
COMMANDS = [line[2:] for fence in fences(PAGE) if fence.language == "console" for line in fence.text.splitlines()]
_INSTALL = {"--wait": 0, "--timeout": 1}
"""Options that only an installation takes, with the number of their words."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the commands run: the page's files, the chart, and settings."""
    for fence in fences(PAGE):
        if fence.file:
            (tmp_path / fence.file).write_text(fence.text, encoding="utf-8")
    (tmp_path / "headrace.toml").write_text("[scorer]\nreward_wait_s = 60.0\n", encoding="utf-8")
    (tmp_path / "deploy").symlink_to(ROOT / "deploy")
    return tmp_path


@pytest.mark.parametrize("command", [one for one in COMMANDS if one.startswith("helm ")])
def test_what_is_installed_renders(command: str, folder: Path) -> None:
    words = shlex.split(command)[2:]
    for option, more in _INSTALL.items():
        if option in words:
            del words[words.index(option) : words.index(option) + 1 + more]
    process = subprocess.run(
        [str(BIN / "helm"), "template", *words, "--kube-version", VERSIONS[-1]],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert "registry.example.com/headrace/headrace-gateway:" in process.stdout


def test_secrets_have_the_names_that_the_chart_looks_for(folder: Path) -> None:
    expected = {
        (item["name"], item["key"]) for item in (values()["internalKeySecret"], values()["gateway"]["keysSecret"])
    }
    matches = [re.search(r"generic (\S+) --from-(?:literal|file)=([\w.-]+)", item) for item in COMMANDS]
    assert {(item[1], item[2]) for item in matches if item} == expected
    if not shutil.which("kubectl"):
        return
    for command in (item for item in COMMANDS if item.startswith("kubectl create")):
        process = subprocess.run(
            f"{command} --dry-run=client -o yaml", shell=True, cwd=folder, capture_output=True, text=True, check=True
        )
        assert yaml.safe_load(process.stdout)["kind"] == "Secret"


def test_the_commands_name_services_and_values_that_exist() -> None:
    assert [command for command in COMMANDS if command.startswith("kubectl port-forward")] == [
        "kubectl port-forward service/headrace-gateway 8000"
    ]
    page = PAGE.read_text(encoding="utf-8") + (CHART / "README.md").read_text(encoding="utf-8")
    for name in set(re.findall(rf"`((?:{'|'.join(values())})(?:\.\w+)+)`", page)):
        inner = values()
        for part in name.split("."):
            assert part in inner or part in ("nodeSelector", "tolerations", "environmentSecrets"), name
            inner = inner.get(part, {})
