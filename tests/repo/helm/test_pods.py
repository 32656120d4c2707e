"""Tests of the permissions of Pods, of the folders that they write, and of their shutdown when a node is drained."""

from __future__ import annotations

from typing import Any

import pytest

from tests.repo.compose_files import services
from tests.repo.helm.chart import SECRETS, VARIANTS, Container, containers, objects, of_kind

DATA = "/var/lib/headrace"
each_variant = pytest.mark.parametrize("variant", VARIANTS)


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
