"""Deployments as their tools read them: Compose files, and the Helm chart for several sets of values.

Compose files have the variables of `.env.example` and the required secrets. The chart has objects, Pods, containers,
and the environment of their processes. `python -m tests.repo.deployments FOLDER MODULE@VERSION...` collects the JSON
schemas for rendered charts. The schemas of Kubernetes come from the package kubernetes-validate in the environment
FOLDER. Those of custom resources come from the definitions in Go modules, which Go's checksum database verifies.
FOLDER/schemas has the layout that kubeconform reads.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.support import presence

ROOT = Path(__file__).resolve().parents[2]
MAIN = ROOT / "docker-compose.yml"
EXAMPLE = ROOT / "examples/email_agent/docker-compose.yml"
COMPOSE_SECRETS = {"POSTGRES_PASSWORD": "secret", "INTERNAL_KEY": "123", "GATEWAY_KEY_SHA256": "ab" * 32}
_VARIABLE = re.compile(r"(?<!\$)\$\{(?P<name>\w+)(?::(?P<kind>[-?])(?P<text>[^}]*))?\}")
Service = dict[str, Any]
OWN_IMAGES = {"inference-vllm": "headrace-inference-vllm", "trainer-trinity": "headrace-trinity"}
"""Images by container, for containers with another image than their service's."""


def variables(path: Path) -> dict[str, str | None]:
    """Return the variables of a file with their defaults, or None for a variable that Compose requires."""
    defaults: dict[str, str | None] = {}
    for use in _VARIABLE.finditer(path.read_text(encoding="utf-8")):
        if use["kind"] is not None or use["name"] not in defaults:
            defaults[use["name"]] = use["text"] if use["kind"] == "-" else None
    return defaults


def env_example() -> dict[str, str]:
    lines = (ROOT / ".env.example").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def filled(path: Path, **values: str) -> dict[str, Any]:
    """Return the file with all variables replaced. `values` override `.env.example`."""
    chosen = {**env_example(), **COMPOSE_SECRETS, **values}

    def value(use: re.Match[str]) -> str:
        return chosen.get(use["name"]) or (use["text"] if use["kind"] == "-" else "")

    text = _VARIABLE.sub(value, path.read_text(encoding="utf-8"))
    loaded: dict[str, Any] = yaml.safe_load(text.replace("$$", "$"))
    return loaded


@cache
def services(**values: str) -> dict[str, Service]:
    """Return the services of the main file. The result is shared, so callers must not change it."""
    containers: dict[str, Service] = filled(MAIN, **values)["services"]
    return containers


def ours() -> dict[str, Service]:
    """Return the services whose images are built in this repository."""
    return {name: service for name, service in services().items() if "build" in service}


def image_of(container: str) -> str:
    return OWN_IMAGES.get(container, f"headrace-{service_of(container)}")


def service_of(container: str) -> str:
    """Return the service of one of our containers: the part of its name before the hyphen.

    The rest of the name is the device of the service.
    """
    return container.partition("-")[0]


CHART = ROOT / "deploy/helm/headrace"
BIN = presence.HELM / "bin"
SCHEMAS = presence.HELM / "schemas"
DATABASE_URL = "postgresql://headrace:secret@db/headrace"
SECRETS = {
    ("headrace-internal", "internal-key"): "1234",  # of digits: it is text all the same
    ("headrace-database", "url"): DATABASE_URL,
    ("judge-endpoint", "api-key"): "5678",
}
"""Values of the Secrets by name and key."""
FIELDS = {"metadata.name": "pod-0", "status.podIP": "10.0.0.7"}
OFF = ("--set", "single.enabled=false,bus.address=kafka:9092,database.urlSecret.name=headrace-database")


def _files(*names: str) -> tuple[str, ...]:
    """Return the helm arguments for several values files, of which later ones override earlier ones."""
    return tuple(word for name in names for word in ("--values", str(CHART / f"values-{name}.yaml")))


_USERS = json.dumps(f"""[[console.users]]
name = "ann"
sha256 = "{"ab" * 32}"
""")
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
    "console": (*OFF, "--set", "console.enabled=true,networkPolicy.enabled=true", "--set-json", f"settings={_USERS}"),
}
"""Arguments of `helm template` for each variant that the tests render."""
Object = dict[str, Any]


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(BIN / "helm"), *arguments], capture_output=True, text=True, check=False, cwd=ROOT)


def template(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Render the chart for the newest Kubernetes version whose schemas are in the repository."""
    return helm("template", "headrace", str(CHART), "--kube-version", VERSIONS[-1], *arguments)


@cache
def text(variant: str) -> str:
    rendered = template(*VARIANTS[variant])
    assert rendered.returncode == 0, rendered.stderr
    return rendered.stdout


def objects(variant: str) -> list[Object]:
    """Return the rendered objects of a variant. They are parsed for each call, so callers may change them."""
    return [document for document in yaml.safe_load_all(text(variant)) if document]


def of_kind(variant: str, kind: str) -> dict[str, Object]:
    """Return the objects of a kind by name."""
    return {item["metadata"]["name"]: item for item in objects(variant) if item["kind"] == kind}


@dataclass(frozen=True)
class Container:
    """Container of a workload, with its Pod and its settings file."""

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
        """Return the names of the mounted volumes by path."""
        return {mount["mountPath"]: mount["name"] for mount in self.spec["volumeMounts"]}

    def volume(self, name: str) -> Object:
        """Return a volume of the Pod, or the volume claim template of its StatefulSet."""
        claims = {
            volume_claim["metadata"]["name"]: volume_claim
            for volume_claim in self.workload["spec"].get("volumeClaimTemplates", ())
        }
        source: Object = {volume_claim["name"]: volume_claim for volume_claim in self.pod["volumes"]}.get(
            name
        ) or claims[name]
        return source

    def environment(self) -> dict[str, str]:
        """Return the environment of the process, with the values of Secrets, field references and `$(NAME)`."""
        seen: dict[str, str] = {}
        for variable in self.spec["env"]:
            assert variable["name"] not in seen, f"{self.label} has {variable['name']} twice"
            seen[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda use: seen[use[1]], _value(variable))
        return seen


def containers(documents: list[Object]) -> Iterator[Container]:
    """Yield the containers and init containers of every workload among the objects."""
    settings = next(
        document["data"]["headrace.toml"]
        for document in documents
        if document["kind"] == "ConfigMap" and _is_settings(document)
    )
    for workload in documents:
        if workload["kind"] in ("Deployment", "StatefulSet"):
            pod = workload["spec"]["template"]["spec"]
            for spec in (*pod.get("initContainers", ()), *pod["containers"]):
                yield Container(workload, pod, spec, settings)


def kubeconform(rendered: str, version: str) -> str:
    """Return the errors by the schemas, or an empty string. A kind without a schema is an error."""
    folders = (SCHEMAS / f"v{version}", SCHEMAS / "custom")
    locations = [f"-schema-location={folder}/{{{{.ResourceKind}}}}{{{{.KindSuffix}}}}.json" for folder in folders]
    process = subprocess.run(
        [str(BIN / "kubeconform"), "-strict", *locations],
        input=rendered,
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if process.returncode == 0 else process.stdout + process.stderr


def values() -> Object:
    """Return the default values."""
    loaded: Object = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return loaded


def _is_settings(config_map: Object) -> bool:
    return str(config_map["metadata"]["name"]).endswith("-settings")


def _value(variable: Mapping[str, Any]) -> str:
    if "value" in variable:
        value = variable["value"]
        assert isinstance(value, str), f"{variable['name']} is {value!r}: a server takes text alone"
        return value
    source = variable["valueFrom"]
    if "fieldRef" in source:
        return FIELDS[source["fieldRef"]["fieldPath"]]
    return SECRETS[source["secretKeyRef"]["name"], source["secretKeyRef"]["key"]]


VERSIONS = ("1.29.0", "1.34.0")
"""Of Kubernetes: the oldest that the chart is for, and the newest that the package knows."""
KINDS = {"keda.sh_scaledobjects", "monitoring.coreos.com_servicemonitors", "monitoring.coreos.com_prometheusrules"}
_ELSEWHERE, _BESIDE = "/api/_definitions.json", "_definitions.json"


def main(folder: Path, modules: list[str]) -> None:
    target = folder / "schemas"
    shutil.rmtree(target, ignore_errors=True)
    source = next(folder.glob("lib/python*/site-packages/kubernetes_validate/kubernetes-json-schema"))
    for version in VERSIONS:
        version_folder = target / f"v{version}"
        version_folder.mkdir(parents=True)
        for path in (source / f"v{version}-local-strict").glob("*.json"):
            schema = json.loads(path.read_text(encoding="utf-8").replace(_ELSEWHERE, _BESIDE))
            schema.pop("$id", None)  # references are to the files beside it
            (version_folder / path.name).write_text(json.dumps(schema), encoding="utf-8")
    (target / "custom").mkdir()
    for module in modules:
        for path in _module_folder(module).rglob("*.yaml"):
            if path.stem in KINDS:
                _custom(yaml.safe_load(path.read_text(encoding="utf-8")), target / "custom")
    missing = len(KINDS) - len(list((target / "custom").iterdir()))
    if missing:
        sys.exit(f"{missing} of {', '.join(sorted(KINDS))} are in none of {', '.join(modules)}")


def _module_folder(module: str) -> Path:
    command = ["go", "mod", "download", "-json", module]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed: {process.stderr.strip() or process.stdout.strip()}")
    return Path(json.loads(process.stdout)["Dir"])


def _custom(definition: dict[str, Any], target: Path) -> None:
    """Write one schema file for each kind, from the last version of its definition."""
    spec = definition["spec"]
    for version in spec["versions"]:
        name = f"{spec['names']['kind'].lower()}-{spec['group'].split('.')[0]}-{version['name']}.json"
        schema = strict(version["schema"]["openAPIV3Schema"])
        (target / name).write_text(json.dumps(schema), encoding="utf-8")


def strict(schema: Any) -> Any:
    """Return the schema with `additionalProperties` refused, because a server silently drops unknown names."""
    if isinstance(schema, list):
        return [strict(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {name: strict(part) for name, part in schema.items()}
    open_ended = inner.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in inner
    if isinstance(inner.get("properties"), dict) and inner.get("type") == "object" and not open_ended:
        inner["additionalProperties"] = False
    return inner


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), sys.argv[2:])
