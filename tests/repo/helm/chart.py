"""The chart as a server gets it, for a few sets of values: objects, Pods, containers, and what their processes see."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import yaml

from tests.repo.compose_files import ROOT
from tests.repo.helm.schemas import VERSIONS
from tests.support import presence

CHART = ROOT / "deploy/helm/headrace"
BIN = presence.HELM / "bin"
SCHEMAS = presence.HELM / "schemas"
DATABASE_URL = "postgresql://headrace:secret@db/headrace"
SECRETS = {
    ("headrace-internal", "internal-key"): "1234",  # of digits: it is text all the same
    ("headrace-database", "url"): DATABASE_URL,
    ("judge-endpoint", "api-key"): "5678",
}
"""What Secrets hold, by name and key."""
FIELDS = {"metadata.name": "pod-0", "status.podIP": "10.0.0.7"}
OFF = ("--set", "single.enabled=false,bus.address=kafka:9092,database.urlSecret.name=headrace-database")


def _files(*names: str) -> tuple[str, ...]:
    """Of values, one over the other."""
    return tuple(word for name in names for word in ("--values", str(CHART / f"values-{name}.yaml")))


VARIANTS: dict[str, tuple[str, ...]] = {
    "default": (),
    "gpu": _files("gpu"),
    "vllm": (*_files("gpu", "vllm"), "--set", "inference.gpus=2"),
    "trinity": (*OFF, *_files("vllm", "trinity")),
    "production": _files("production"),
    "claims": (*OFF, "--set", "code.configMap=agent", "--set-string", "inference.environment.OMP_NUM_THREADS=2"),
    "lineages": (*OFF, "--values", str(ROOT / "tests/repo/helm/lineages.yaml")),
    "judge": (
        *("--set", "judge.enabled=true", "--set", "judge.endpoint.baseUrl=http://judge:1/v1"),
        *("--set-string", "judge.endpoint.model=1", "--set", "judge.endpoint.apiKeySecret.name=judge-endpoint"),
        *("--set", "networkPolicy.enabled=true", "--set", "single.storage.existingClaim=disk"),
    ),
}
"""What the tests render, by name: arguments of `helm template`."""

Object = dict[str, Any]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BIN / "helm"), *arguments], capture_output=True, text=True, check=False, cwd=ROOT)


def template(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The chart for the newest Kubernetes that we have schemas of."""
    return helm("template", "headrace", str(CHART), "--kube-version", VERSIONS[-1], *arguments)


@cache
def text(variant: str) -> str:
    done = template(*VARIANTS[variant])
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(variant: str) -> list[Object]:
    """Parsed anew for each caller, who may change them."""
    return [one for one in yaml.safe_load_all(text(variant)) if one]


def of_kind(variant: str, kind: str) -> dict[str, Object]:
    """By name."""
    return {one["metadata"]["name"]: one for one in objects(variant) if one["kind"] == kind}


@dataclass(frozen=True)
class Container:
    """One container of a workload, with its Pod and the settings file that it is given."""

    workload: Object
    pod: Object
    spec: Object
    settings: str

    @property
    def service(self) -> str:
        return str(self.spec["name"])

    @property
    def label(self) -> str:
        return f"{self.workload['metadata']['name']}/{self.service}"

    @property
    def mounts(self) -> dict[str, str]:
        """Place to the volume there."""
        return {mount["mountPath"]: mount["name"] for mount in self.spec["volumeMounts"]}

    def volume(self, name: str) -> Object:
        """Of the Pod, or of the claims that each replica has of its own."""
        claims = {one["metadata"]["name"]: one for one in self.workload["spec"].get("volumeClaimTemplates", ())}
        found: Object = {one["name"]: one for one in self.pod["volumes"]}.get(name) or claims[name]
        return found

    def environment(self) -> dict[str, str]:
        """As the process sees it: Secrets and fields looked up, `$(NAME)` put in."""
        seen: dict[str, str] = {}
        for variable in self.spec["env"]:
            assert variable["name"] not in seen, f"{self.label} has {variable['name']} twice"
            seen[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda use: seen[use[1]], _value(variable))
        return seen


def containers(found: list[Object]) -> Iterator[Container]:
    """Of every workload among the objects, those of initialization too."""
    settings = next(one["data"]["headrace.toml"] for one in found if one["kind"] == "ConfigMap" and _is_settings(one))
    for workload in found:
        if workload["kind"] in ("Deployment", "StatefulSet"):
            pod = workload["spec"]["template"]["spec"]
            for spec in (*pod.get("initContainers", ()), *pod["containers"]):
                yield Container(workload, pod, spec, settings)


def kubeconform(rendered: str, version: str) -> str:
    """What is wrong by the schemas; empty when nothing is. A kind without a schema is wrong."""
    places = (SCHEMAS / f"v{version}", SCHEMAS / "custom")
    locations = [f"-schema-location={place}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json" for place in places]
    done = subprocess.run(
        [str(BIN / "kubeconform"), "-strict", *locations],
        input=rendered,
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def values() -> Object:
    """The defaults."""
    loaded: Object = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return loaded


def _is_settings(one: Object) -> bool:
    return str(one["metadata"]["name"]).endswith("-settings")


def _value(variable: Mapping[str, Any]) -> str:
    if "value" in variable:
        value = variable["value"]
        assert isinstance(value, str), f"{variable['name']} is {value!r}: a server takes text alone"
        return value
    source = variable["valueFrom"]
    if "fieldRef" in source:
        return FIELDS[source["fieldRef"]["fieldPath"]]
    return SECRETS[source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]]
