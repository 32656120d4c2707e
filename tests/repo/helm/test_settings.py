"""Tests of the chart with the settings code of the services: names, values, ports and command lines."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_console.settings import ConsoleSettings
from headrace_gateway.access.keys import read_keys
from headrace_gateway.settings import GatewaySettings
from headrace_inference.settings import InferenceSettings, TorchSettings
from headrace_inference.vllm_engine.settings import VllmSettings
from headrace_judge.settings import JudgeSettings
from headrace_registry.settings import RegistrySettings
from headrace_runtime.errors import SettingError
from headrace_runtime.kafka.topics import catalogue
from headrace_runtime.main import Service as Program
from headrace_runtime.settings.sections import Common, ServiceSettings, load
from headrace_runtime.settings.table import CONFIG_VARIABLE
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.trinity_learner.configuration import TrinitySettings
from tests.repo.deployments import (
    DATABASE_URL,
    OWN_IMAGES,
    ROOT,
    SECRETS,
    VARIANTS,
    Container,
    containers,
    objects,
    of_kind,
    ours,
    services,
    values,
)

KEYS = '[[keys]]\nname = "agent"\nsha256 = "' + "ab" * 32 + '"\n'
WITH_DATABASE = {"collector", "scorer", "judge", "registry", "console"}
OWN_BY_VARIANT = {
    ("vllm", "inference"): "headrace-inference-vllm",
    ("trinity", "inference"): "headrace-inference-vllm",
    ("trinity", "trainer"): "headrace-trinity",
}
OWN_VARIANTS = ("vllm", "trinity")
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def program(service: str) -> Program[Any]:
    definition: Program[Any] = import_module(f"headrace_{service}.__main__").SERVICE
    return definition


def load_settings(container: Container, folder: Path) -> tuple[Common, ServiceSettings]:
    """Load the settings with which the container would start.

    Raises:
        SettingError: the container would refuse to start.
    """
    environ = container.environment()
    config = folder / "headrace.toml"
    config.write_text(container.settings, encoding="utf-8")
    assert container.mounts[environ[CONFIG_VARIABLE]] == "settings"
    if keys := environ.get("HEADRACE_GATEWAY__KEYS_FILE"):
        assert container.mounts[str(Path(keys).parent)] == "keys"
        (folder / "keys.toml").write_text(KEYS, encoding="utf-8")
        environ["HEADRACE_GATEWAY__KEYS_FILE"] = str(folder / "keys.toml")
    return load(container.service, program(container.service).settings, config, environ)


@each_variant
def test_every_setting_is_one_that_the_service_starts_with(variant: str, tmp_path: Path) -> None:
    seen = set()
    for container in containers(objects(variant)):
        common, settings = load_settings(container, tmp_path)
        seen.add(container.service)
        assert settings.host == "0.0.0.0", container.label
        assert common.security.internal_key.get_secret_value() == SECRETS["headrace-internal", "internal-key"]
        database = common.database.url.get_secret_value()
        single = "broker" in {init_container["name"] for init_container in container.pod.get("initContainers", ())}
        assert database == (DATABASE_URL if container.service in WITH_DATABASE and not single else "sqlite")
        assert (common.bus.address == "127.0.0.1:9092") == single
        if isinstance(settings, GatewaySettings):
            assert [key.name for key in read_keys(settings)] == ["agent"]
    assert seen >= {"gateway", "inference", "collector", "scorer", "registry", "trainer"}


@each_variant
def test_ports_are_those_of_the_services(variant: str) -> None:
    """Each container, its probe and its Service use the default port of the service."""
    ports = {}
    for container in containers(objects(variant)):
        port = program(container.service).settings.model_fields["port"].default
        assert container.spec["ports"] == [{"name": container.service, "containerPort": port}]
        assert container.spec["readinessProbe"]["httpGet"] == {"path": "/health", "port": container.service}
        ports[container.service] = port
    kubernetes_services = of_kind(variant, "Service").values()
    names = [service["metadata"]["labels"]["app.kubernetes.io/component"] for service in kubernetes_services]
    assert {
        name: service["spec"]["ports"][0]["port"] for name, service in zip(names, kubernetes_services, strict=True)
    } == ports
    assert [service["spec"]["ports"][0]["targetPort"] for service in kubernetes_services] == names


@each_variant
def test_every_selector_finds_pods(variant: str) -> None:
    chart_objects = objects(variant)
    labels = [container.workload["spec"]["template"]["metadata"]["labels"] for container in containers(chart_objects)]
    for chart_object in chart_objects:
        selectors = {"Service": ("selector",), "PodDisruptionBudget": ("selector", "matchLabels")}
        path = selectors | {"NetworkPolicy": ("podSelector", "matchLabels"), "StatefulSet": ("selector", "matchLabels")}
        selector: Any = chart_object["spec"] if chart_object["kind"] in path else None
        for part in path.get(chart_object["kind"], ()):
            selector = selector[part]
        name = chart_object["metadata"]["name"]
        assert selector is None or any(selector.items() <= label.items() for label in labels), name


def test_images_are_those_that_are_built() -> None:
    """Services' images are those of the compose file, and the broker's image is in the list of `make lock`."""
    composed = {container["image"] for container in ours().values()}
    named = re.search(r"^IMAGES := (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    built = {f"headrace-{name}" for name in named[1].split()} if named else set()
    for variant in VARIANTS:
        for container in containers(objects(variant)):
            image = container.spec["image"].rpartition("/")[2].partition(":")[0]
            assert image in composed or container.service == "broker"
            assert image in built or image in OWN_IMAGES.values()
            assert image == f"headrace-{container.service}" or OWN_BY_VARIANT[variant, container.service] == image


def test_every_service_of_the_compose_file_is_there() -> None:
    """The console needs users and a TLS proxy, so the chart disables it by default."""
    composed = {container["build"]["args"]["SERVICE"] for container in ours().values()}
    assert {container.service for container in containers(objects("production"))} == composed - {"console"}
    assert {container.service for container in containers(objects("judge"))} == {*composed, "broker"} - {"console"}
    assert {container.service for container in containers(objects("console"))} == composed - {"judge"}


def test_the_console_reaches_every_other_service(tmp_path: Path) -> None:
    console = next(container for container in containers(objects("console")) if container.service == "console")
    _, settings = load_settings(console, tmp_path)
    assert isinstance(settings, ConsoleSettings)
    assert settings.behind_tls
    others = of_kind("console", "Service").values()
    addresses = {
        service["metadata"]["labels"]["app.kubernetes.io/component"]: (
            f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
        )
        for service in others
    }
    assert settings.urls == addresses
    for name, policy in of_kind("console", "NetworkPolicy").items():
        peers = [peer for rule in policy["spec"]["ingress"] or () for peer in rule.get("from") or [{"podSelector": {}}]]
        assert name.endswith("-console") or any("podSelector" in peer for peer in peers), name


def test_resources_are_those_of_the_compose_file() -> None:
    """Chart and compose file set equal memory limits, so that a capacity plan for one also holds for the other."""
    for container in containers(objects("claims")):
        limit = container.spec["resources"]["limits"]["memory"]
        assert limit.lower().removesuffix("i") == services()[container.service]["mem_limit"], container.label


def test_replicas_are_told_apart_and_reached(tmp_path: Path) -> None:
    for variant, url in (("claims", "http://10.0.0.7:8010"), ("default", "http://127.0.0.1:8010")):
        inference = next(container for container in containers(objects(variant)) if container.service == "inference")
        _, settings = load_settings(inference, tmp_path)
        assert isinstance(settings, InferenceSettings)
        assert (settings.replica_id, settings.advertise_url) == ("pod-0", url)


def test_the_gate_plays_through_the_gateway(tmp_path: Path) -> None:
    for variant, host in (("claims", "headrace-gateway:8000"), ("default", "127.0.0.1:8000")):
        registry = next(container for container in containers(objects(variant)) if container.service == "registry")
        _, settings = load_settings(registry, tmp_path)
        assert isinstance(settings, RegistrySettings)
        assert settings.gate.base_url == f"http://{host}/v1"
        assert settings.gate.environment == ("OPENAI_API_KEY",)
        assert registry.environment()["OPENAI_API_KEY"] == SECRETS["headrace-internal", "internal-key"]
        assert host.startswith("127.") or host.partition(":")[0] in of_kind(variant, "Service")


def test_names_that_look_like_numbers_stay_names(tmp_path: Path) -> None:
    trainers = [container for container in containers(objects("lineages")) if container.service == "trainer"]
    trainer_settings = [load_settings(trainer, tmp_path)[1] for trainer in trainers]
    lineages = {
        (settings.model, settings.lineage, settings.base, settings.seed)
        for settings in trainer_settings
        if isinstance(settings, TrainerSettings)
    }
    assert lineages == {("1", "7", "/models/base", 0), ("helper", "true", "/models/second", 3)}
    judge = next(container for container in containers(objects("judge")) if container.service == "judge")
    _, settings = load_settings(judge, tmp_path)
    assert isinstance(settings, JudgeSettings)
    assert settings.endpoint.model == "1"
    assert settings.endpoint.api_key.get_secret_value() == SECRETS["judge-endpoint", "api-key"]


def _torch(settings: InferenceSettings) -> TorchSettings:
    torch_settings = settings.of("torch")
    assert isinstance(torch_settings, TorchSettings)
    return torch_settings


def test_devices_follow_the_number_of_gpus(tmp_path: Path) -> None:
    for variant, device in (("default", "cpu"), ("gpu", "cuda"), ("production", "cuda")):
        for container in containers(objects(variant)):
            limits = container.spec["resources"].get("limits", {})
            if container.service not in ("inference", "trainer"):
                assert "nvidia.com/gpu" not in limits
                continue
            _, settings = load_settings(container, tmp_path)
            assert isinstance(settings, InferenceSettings | TrainerSettings)
            chosen = _torch(settings).device if isinstance(settings, InferenceSettings) else settings.compute.device
            assert (chosen, limits.get("nvidia.com/gpu")) == (device, 1 if device == "cuda" else None)
            assert bool(container.pod.get("nodeSelector")) == (device == "cuda")


def test_vllm_and_trinity_have_images_of_their_own(tmp_path: Path) -> None:
    containers_by_variant = {
        (variant, container.service): container
        for variant in OWN_VARIANTS
        for container in containers(objects(variant))
    }
    for (variant, service), image in OWN_BY_VARIANT.items():
        container = containers_by_variant[variant, service]
        assert container.spec["image"].partition(":")[0].endswith(image)
        assert container.volume(container.mounts["/dev/shm"])["emptyDir"] == {"medium": "Memory"}
        gpus = container.spec["resources"]["limits"]["nvidia.com/gpu"]
        _, settings = load_settings(container, tmp_path)
        if isinstance(settings, InferenceSettings):
            vllm = VllmSettings.model_validate(settings.of("vllm"))
            assert (settings.engine, vllm.tensor_parallel) == ("vllm", gpus)
        else:
            assert isinstance(settings, TrainerSettings)
            trinity = TrinitySettings.model_validate(settings.of("trinity"))
            assert (settings.backend, trinity.gpus_per_node, trinity.command) == (
                "trinity",
                gpus,
                ("/opt/trinity-run",),
            )
            assert trinity.folder.startswith("/var/lib/headrace/trainer/"), "a claim of its own"
    standard_containers = [container for key, container in containers_by_variant.items() if key not in OWN_BY_VARIANT]
    assert standard_containers
    assert not any("/dev/shm" in container.mounts for container in standard_containers)


def test_scaling_looks_at_every_topic_of_the_service() -> None:
    scaled_objects = of_kind("production", "ScaledObject")
    assert (
        scaled_objects.keys() == {"headrace-collector", "headrace-scorer"} <= of_kind("production", "Deployment").keys()
    )
    for name, scaled_object in scaled_objects.items():
        service = name.removeprefix("headrace-")
        triggers = [trigger["metadata"] for trigger in scaled_object["spec"]["triggers"]]
        topics = {topic.name: topic for topic in catalogue().values() if service in topic.consumers}
        assert {trigger["topic"] for trigger in triggers} == topics.keys()
        assert {trigger["consumerGroup"] for trigger in triggers} == {f"headrace-{service}"}
        assert scaled_object["spec"]["maxReplicaCount"] <= min(topic.partitions for topic in topics.values())
        assert "replicas" not in of_kind("production", "Deployment")[name]["spec"]
    assert of_kind("claims", "ScaledObject") == {}


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HEADRACE_COLLECTOR__PROT", "1", "did you mean 'port'"),
        ("HEADRACE_BUS__ADRESS", "kafka:9092", "did you mean 'address'"),
        ("HEADRACE_GATEWAY_PORT", "tcp://10.0.0.1:8000", "gateway_port"),
    ],
)
def test_a_variable_that_is_no_setting_is_noticed(variable: str, value: str, message: str, tmp_path: Path) -> None:
    """Kubernetes itself adds the last variable if service links are enabled."""
    container = next(container for container in containers(objects("claims")) if container.service == "collector")
    container.spec["env"].append({"name": variable, "value": value})
    with pytest.raises(SettingError, match=message):
        load_settings(container, tmp_path)


def test_settings_reach_the_services(tmp_path: Path) -> None:
    container = next(container for container in containers(objects("production")) if container.service == "scorer")
    assert yaml.safe_load((ROOT / "deploy/helm/headrace/values-production.yaml").read_text())["settings"]
    _, settings = load_settings(container, tmp_path)
    assert settings.model_dump()["required"] == ("function:answer",)
    assert values()["settings"] == ""
