"""Tests of the rendered chart: schemas know every field, and Pods have the permissions and folders that they need.

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
from tests.repo.deployments import (
    BIN,
    CHART,
    ROOT,
    SECRETS,
    VARIANTS,
    VERSIONS,
    Container,
    containers,
    helm,
    kubeconform,
    objects,
    of_kind,
    services,
    template,
    text,
    values,
)

SECOND = '{"model": "m", "lineage": "l", "base": "/m", "logs": {}, "resources": {}}'
each_variant = pytest.mark.parametrize("variant", VARIANTS)
DATA = "/var/lib/headrace"


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


@each_variant
def test_a_pod_has_no_more_rights_than_it_needs(variant: str) -> None:
    """Pods satisfy Kubernetes' profile `restricted`, and have a read-only root file system."""
    for container in containers(objects(variant)):
        assert container.pod["securityContext"]["runAsNonRoot"] is True
        assert container.pod["securityContext"]["runAsUser"] == 10001, "the user of the images"
        assert container.pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert container.pod["automountServiceAccountToken"] is False
        assert container.pod["enableServiceLinks"] is False, "their variables would be taken for settings"
        assert container.pod["shareProcessNamespace"] is True, "as `init: true` in the compose file"
        assert container.spec["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@each_variant
def test_the_data_folder_and_tmp_can_be_written(variant: str) -> None:
    """A service may lose files of `data_dir` outside its volumes, but is never ready without the folder."""
    for container in containers(objects(variant)):
        writable = {mount["mountPath"] for mount in container.spec["volumeMounts"] if not mount.get("readOnly")}
        assert {"/tmp", DATA} <= writable, container.label
        assert all(container.volume(name) for name in container.mounts.values())


@each_variant
def test_what_must_stay_is_on_claims(variant: str) -> None:
    for container in containers(objects(variant)):
        blobs = "HEADRACE_BLOBS__URL" in container.environment()
        folders = {"gateway": ["gateway"], "trainer": ["trainer"]}.get(container.service, [])
        if "broker" in {init_container["name"] for init_container in container.pod.get("initContainers", ())}:
            folders, blobs = ["db", "broker", *folders], False  # in a single Pod all of it is one claim
        for folder in [*folders, *([] if blobs else ["blobs"])]:
            assert _is_claim(container, f"{DATA}/{folder}"), f"{container.label}: {folder}"


def _is_claim(container: Container, volume_name: str) -> bool:
    under = max((mount for mount in container.mounts if f"{volume_name}/".startswith(f"{mount}/")), key=len)
    volume = container.volume(container.mounts[under])
    return "persistentVolumeClaim" in volume or "accessModes" in volume.get("spec", {})


def test_a_claim_of_blobs_is_shared_and_outlives_the_release() -> None:
    claim = of_kind("claims", "PersistentVolumeClaim")["headrace-blobs"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert of_kind("production", "PersistentVolumeClaim") == {}


def test_spools_and_lineages_have_one_owner_each() -> None:
    sets = of_kind("lineages", "StatefulSet")
    assert {name: stateful_set["spec"]["replicas"] for name, stateful_set in sets.items()} == {
        "headrace-gateway": 2,
        "headrace-trainer-main": 1,
        "headrace-trainer-second": 1,
    }
    for stateful_set in sets.values():
        claims = [claim["metadata"]["name"] for claim in stateful_set["spec"]["volumeClaimTemplates"]]
        assert claims == ["own"]
        selected = stateful_set["spec"]["selector"]["matchLabels"].items()
        other_sets = [other for other in sets.values() if other is not stateful_set]
        assert not any(selected <= other["spec"]["template"]["metadata"]["labels"].items() for other in other_sets)


def test_the_broker_is_there_before_the_others_and_after_them() -> None:
    single = of_kind("default", "StatefulSet")["headrace"]
    assert single["spec"]["replicas"] == 1
    (broker,) = single["spec"]["template"]["spec"]["initContainers"]
    assert (broker["name"], broker["restartPolicy"]) == ("broker", "Always")
    assert broker["startupProbe"]["httpGet"]["path"] == "/health"
    assert all("broker" not in name for name in of_kind("production", "Service"))


@each_variant
def test_an_unready_service_is_not_restarted(variant: str) -> None:
    """`/health` returns 503 while there is no version to serve. The watchdog of the image ends a process that hangs."""
    for container in containers(objects(variant)):
        assert "livenessProbe" not in container.spec
        assert not {"command", "args"} & container.spec.keys(), "the image's own entry point"
        assert container.environment()["HANG_TIMEOUT_S"] == str(services()["gateway"]["environment"]["HANG_TIMEOUT_S"])


@each_variant
def test_no_secret_is_rendered(variant: str) -> None:
    assert not [item for item in objects(variant) if item["kind"] == "Secret"]
    for container in containers(objects(variant)):
        for name, value in container.environment().items():
            plain = {item["name"] for item in container.spec["env"] if "value" in item}
            assert not (value in SECRETS.values() and name in plain), name


def test_a_drained_node_takes_one_pod_of_a_service() -> None:
    budgets = of_kind("production", "PodDisruptionBudget")
    assert {budget["metadata"]["labels"]["app.kubernetes.io/component"] for budget in budgets.values()} == {
        container.service for container in containers(objects("production"))
    }
    assert all(budget["spec"]["maxUnavailable"] == 1 for budget in budgets.values())
    assert of_kind("default", "PodDisruptionBudget") == {}


def test_nobody_is_sent_to_a_gateway_that_stops() -> None:
    gateway = next(container for container in containers(objects("production")) if container.service == "gateway")
    drain_s = int(gateway.spec["lifecycle"]["preStop"]["exec"]["command"][1])
    assert gateway.pod["terminationGracePeriodSeconds"] >= drain_s + 30


def _peers(variant: str, policy: str) -> dict[str, Any]:
    rules = of_kind(variant, "NetworkPolicy")[policy]["spec"]["ingress"]
    return {rule["ports"][0]["port"]: rule.get("from", "everybody") for rule in rules or []}


def test_ports_are_open_for_those_who_need_them() -> None:
    own_ports = {
        "podSelector": {"matchLabels": {"app.kubernetes.io/name": "headrace", "app.kubernetes.io/instance": "headrace"}}
    }
    assert _peers("lineages", "headrace-gateway") == {"gateway": "everybody"}
    assert _peers("lineages", "headrace-inference") == {"inference": [own_ports]}
    assert _peers("lineages", "headrace-registry")["registry"] == [
        own_ports,
        {"podSelector": {"matchLabels": {"app": "ops"}}},
    ]
    assert _peers("lineages", "headrace-collector") == {}
    assert _peers("production", "headrace-gateway")["gateway"][0] == own_ports, "the gate of the registry calls it"
    assert [*_peers("production", "headrace-collector")["collector"][0]] == ["namespaceSelector"]
    assert _peers("judge", "headrace-single") == {
        "gateway": "everybody",
        "inference": [own_ports],
        "registry": [own_ports],
    }


def test_dashboards_alerts_and_targets_go_together() -> None:
    monitor = of_kind("production", "ServiceMonitor")["headrace"]["spec"]
    assert monitor["jobLabel"] == "app.kubernetes.io/component"
    services = of_kind("production", "Service").values()
    for service in services:
        assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert service["spec"]["ports"][0]["name"] == monitor["endpoints"][0]["port"]
    jobs = {service["metadata"]["labels"]["app.kubernetes.io/component"] for service in services}
    rules = of_kind("production", "PrometheusRule")["headrace"]["spec"]["groups"][0]["rules"]
    down = next(rule["expr"] for rule in rules if rule["alert"] == "ServiceDown")
    assert jobs <= set(down.partition('"')[2].partition('"')[0].split("|"))
    boards = [name for name in of_kind("production", "ConfigMap") if "-dashboard-" in name]
    assert boards == [f"headrace-dashboard-{name}" for name in ("learning", "rollouts", "services")]
