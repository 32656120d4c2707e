"""Kubernetes, KEDA and the Prometheus operator know every rendered field, and the chart knows every value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.repo.helm.chart import CHART, VARIANTS, helm, kubeconform, objects, template, text, values
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
    """The check above could not otherwise be trusted."""
    document: Any = next(candidate for candidate in objects("production") if candidate["kind"] == kind)
    assert kubeconform(yaml.safe_dump(document), VERSIONS[-1]) == ""
    inner = document
    for part in path[:-1]:
        inner = inner[part]
    inner[path[-1]] = wrong
    assert "is invalid" in kubeconform(yaml.safe_dump(document), VERSIONS[-1])


def test_the_schema_of_values_is_closed_and_complete() -> None:
    """Each table of the schema refuses other names, unless its names are the user's; each default is in it."""
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
