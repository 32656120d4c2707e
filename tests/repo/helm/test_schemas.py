"""Tests that Kubernetes, KEDA and the Prometheus operator know every rendered field, and the chart every value.

helm and kubectl accept the commands of docs/guides/kubernetes.md and of the chart's README.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.docs.fences import fences
from tests.repo.compose_files import ROOT
from tests.repo.helm.chart import BIN, CHART, VARIANTS, helm, kubeconform, objects, template, text, values
from tests.repo.helm.schemas import VERSIONS

SECOND = '{"model": "m", "lineage": "l", "base": "/m", "logs": {}, "resources": {}}'
each_variant = pytest.mark.parametrize("variant", VARIANTS)


@each_variant
def test_lint_finds_nothing(variant: str) -> None:
    process = helm("lint", str(CHART), "--strict", "--kube-version", VERSIONS[-1], *VARIANTS[variant])
    assert process.returncode == 0, process.stdout + process.stderr


@each_variant
@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_fits_its_schema(variant: str, version: str) -> None:
    assert kubeconform(text(variant), version) == ""


@each_variant
def test_names_are_unique(variant: str) -> None:
    names = [(item["kind"], item["metadata"]["name"]) for item in objects(variant)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("kind", "path", "wrong"),
    [
        ("StatefulSet", ("spec", "template", "spec", "containers", 0, "readynessProbe"), {}),
        ("StatefulSet", ("spec", "replicas"), "three"),
        ("ScaledObject", ("spec", "maxReplicas"), 4),
        ("ServiceMonitor", ("spec", "endpoints", 0, "authorisation"), {}),
        ("PodDisruptionBudget", ("spec", "minimum"), 1),
    ],
)
def test_a_wrong_field_is_noticed(kind: str, path: tuple[Any, ...], wrong: object) -> None:
    """The check above can fail: a wrong field is reported."""
    document: Any = next(candidate for candidate in objects("production") if candidate["kind"] == kind)
    assert kubeconform(yaml.safe_dump(document), VERSIONS[-1]) == ""
    inner = document
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = wrong
    assert "is invalid" in kubeconform(yaml.safe_dump(document), VERSIONS[-1])


def test_the_schema_of_values_is_closed_and_complete() -> None:
    """Each table of the schema refuses unknown names, unless users choose the names, and contains each default."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert schema["properties"].keys() - {"global"} == values().keys()
    for table in _tables(schema):
        assert "additionalProperties" in table or "allOf" in table, table


def _tables(schema: Any) -> list[dict[str, Any]]:
    if isinstance(schema, list):
        return [table for part in schema for table in _tables(part)]
    if not isinstance(schema, dict):
        return []
    inner = [table for part in schema.values() for table in _tables(part)]
    return [schema, *inner] if "properties" in schema and schema.get("type") == "object" else inner


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--set", "gatway.replicas=2"), "gatway"),
        (("--set", "gateway.replica=2"), "replica"),
        (("--set", "trainers.main.learning_rate=1"), "learning_rate"),
        (("--set", "collector.autoscaling.minReplicas=0"), "minReplicas"),
        (("--set", "bus.address=kafka"), "bus/address"),
        (("--set", "gateway.environment.OPENAI_API_KEY=x"), "OPENAI_API_KEY"),
        (("--set", "single.enabled=false"), "bus.address is empty"),
        (("--set", "bus.address=kafka:9092"), "single.enabled to false"),
        (("--set", "single.enabled=false", "--set", "bus.address=kafka:9092"), "database.urlSecret.name is empty"),
        (("--set", "judge.enabled=true"), "judge.endpoint.baseUrl is empty"),
        (("--set", "inference.engine=vllm"), "inference.gpus is 0"),
        (("--set", "inference.engine=vlm"), "inference/engine"),
        (("--set", "trainers.main.backend=trinity"), "its gpus are 0"),
        (("--set", "code.claim=a", "--set", "code.configMap=b"), "code.claim are both set"),
        (("--set", "settings=[broken"), "settings is not valid TOML"),
        (("--set", 'settings=security.internal_key = "x"'), "settings has security.internal_key"),
        (("--set", 'settings=[database]\nurl = "postgresql://a:b@c/d"'), "settings has database.url"),
        (("--set-json", f"trainers.two={SECOND}"), "a single Pod runs one; set single"),
    ],
)
def test_what_cannot_be_meant_is_refused(arguments: tuple[str, ...], message: str) -> None:
    process = template(*arguments)
    assert process.returncode != 0
    assert message in process.stderr


def test_a_lineage_has_one_owner(tmp_path: Path) -> None:
    twice = tmp_path / "values.yaml"
    main = values()["trainers"]["main"]
    twice.write_text(yaml.safe_dump({"trainers": {"main": main, "other": main}}))
    process = template(*VARIANTS["claims"], "--values", str(twice))
    assert process.returncode != 0
    assert 'trainers.other.lineage is "main", as is that of trainers.main' in process.stderr


PAGE = ROOT / "docs/guides/kubernetes.md"
COMMANDS = [line[2:] for fence in fences(PAGE) if fence.language == "console" for line in fence.text.splitlines()]
_INSTALL = {"--wait": 0, "--timeout": 1}
"""Options that only an installation takes, with the number of their words."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the page's files, the chart, and settings, in which the commands run."""
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
