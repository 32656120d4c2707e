"""Dashboards, alerts and scrape targets name existing things: metrics, labels, services and ports."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

from tests.repo.compose_files import ROOT, ours, service_of, services

FOLDER = ROOT / "deploy" / "observability"
SUFFIXES = {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"], "info": ["_info"]}
OF_PROMETHEUS: dict[str, set[str]] = {
    "up": set(),
    "process_resident_memory_bytes": set(),
    "process_cpu_seconds_total": set(),
}
TARGET_LABELS = {"job", "instance"}
WORDS = {"sum", "rate", "increase", "max", "by", "histogram_quantile", "or", "and", "vector", "on"}


def catalogue() -> dict[str, set[str]]:
    """Every series of our services, with its labels."""
    for member in ("runtime", *sorted({service_of(name) for name in ours()})):
        import_module(f"headrace_{member}.metrics")
    labels_by_metric: dict[str, set[str]] = {name: set(labels) for name, labels in OF_PROMETHEUS.items()}
    for metric in list(REGISTRY._collector_to_names):
        if isinstance(metric, MetricWrapperBase) and metric._name.startswith("headrace_"):
            for suffix in SUFFIXES[str(metric._type)]:
                labels_by_metric[metric._name + suffix] = {
                    *metric._labelnames,
                    *(["le"] if suffix == "_bucket" else []),
                }
    return labels_by_metric


def expressions(path: Path) -> list[tuple[str, str]]:
    """Every query of a dashboard or of the alerts, with the text that names its labels."""
    if path.suffix == ".json":
        panels = json.loads(path.read_text(encoding="utf-8"))["panels"]
        return [(target["expr"], target["legendFormat"]) for panel in panels for target in panel["targets"]]
    rules = [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
    return [(rule["expr"], rule["annotations"]["summary"]) for rule in rules]


QUERIES = [
    pytest.param(*query, id=f"{path.stem}-{number}")
    for path in (*sorted(FOLDER.glob("grafana/dashboards/*.json")), FOLDER / "alerts.yml")
    for number, query in enumerate(expressions(path))
]


@pytest.mark.parametrize(("expression", "legend"), QUERIES)
def test_a_query_names_series_and_labels_that_exist(expression: str, legend: str) -> None:
    labels_by_metric = catalogue()
    plain = re.sub(r'"[^"]*"|\[[^]]*\]', "", expression)
    selected = [label for inner in re.findall(r"\{([^}]*)\}", plain) for label in re.findall(r"(\w+)\s*=?[=~!]", inner)]
    grouped = [label for inner in re.findall(r"by \(([^)]*)\)", plain) for label in re.findall(r"\w+", inner)]
    label_names = re.findall(r"\{\{\s*\$?(?:labels\.)?(\w+)\s*\}\}", legend)
    names = set(re.findall(r"[a-z_]\w+", re.sub(r"\{[^}]*\}|by \([^)]*\)", "", plain))) - WORDS
    assert names, expression
    assert names <= labels_by_metric.keys(), f"no such series: {names - labels_by_metric.keys()}"
    labels = {label for name in names for label in labels_by_metric[name]} | TARGET_LABELS
    assert {*selected, *grouped, *label_names} - {"value"} <= labels


def test_all_dashboards_are_there_and_their_panels_explain_themselves() -> None:
    boards = [json.loads(path.read_text(encoding="utf-8")) for path in FOLDER.glob("grafana/dashboards/*.json")]
    assert {board["uid"] for board in boards} == {"headrace-learning", "headrace-rollouts", "headrace-services"}
    for board in boards:
        assert all(panel["title"] and panel["description"] and panel["targets"] for panel in board["panels"])


def test_prometheus_scrapes_every_service_at_its_port() -> None:
    jobs = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    targets = {job["job_name"]: job["dns_sd_configs"][0] for job in jobs}
    for name in {service_of(name) for name in ours()}:
        assert targets[name]["names"] == [name]
        assert str(targets[name]["port"]) == services()[name]["healthcheck"]["test"][-1]


def test_the_files_are_mounted_where_the_programs_look() -> None:
    mounts = [volume for name in ("prometheus", "grafana", "otel-collector") for volume in services()[name]["volumes"]]
    sources = {mount.split(":")[0] for mount in mounts if mount.startswith("./")}
    assert all((ROOT / source).exists() for source in sources)
    command = services()["otel-collector"]["command"][0].removeprefix("--config=")
    assert any(mount.split(":")[1] == command for mount in mounts)
