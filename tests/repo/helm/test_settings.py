"""The services themselves read what the chart gives them: names, values, ports and command lines are the real ones."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace_gateway.access import read_keys
from headrace_gateway.settings import GatewaySettings
from headrace_inference.settings import InferenceSettings, TorchSettings
from headrace_inference.vllm_engine.settings import VllmSettings
from headrace_judge.settings import JudgeSettings
from headrace_registry.settings import RegistrySettings
from headrace_runtime.errors import SettingError
from headrace_runtime.main import Service as Program
from headrace_runtime.settings import Common, ServiceSettings, load
from headrace_runtime.settings_table import CONFIG_VARIABLE
from headrace_runtime.topics import catalogue
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.trinity_learner.settings import TrinitySettings
from tests.repo.compose_files import OWN_IMAGES, ROOT, ours, services
from tests.repo.helm.chart import DATABASE_URL, SECRETS, VARIANTS, Container, containers, objects, of_kind, values

KEYS = '[[keys]]\nname = "agent"\nsha256 = "' + "ab" * 32 + '"\n'
WITH_DATABASE = {"collector", "scorer", "judge", "registry"}
OWN_BY_VARIANT = {
    ("vllm", "inference"): "headrace-inference-vllm",
    ("trinity", "inference"): "headrace-inference-vllm",
    ("trinity", "trainer"): "headrace-trinity",
}
OWN_VARIANTS = ("vllm", "trinity")
each_variant = pytest.mark.parametrize("variant", VARIANTS)


def program(service: str) -> Program[Any]:
    found: Program[Any] = import_module(f"headrace_{service}.__main__").SERVICE
    return found


def started(container: Container, folder: Path) -> tuple[Common, ServiceSettings]:
    """What the container would start with. Raises `SettingError` as it would."""
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
        common, own = started(container, tmp_path)
        seen.add(container.service)
        assert own.host == "0.0.0.0", container.label
        assert common.security.internal_key.get_secret_value() == SECRETS["headrace-internal", "internal-key"]
        database = common.database.url.get_secret_value()
        single = "broker" in {one["name"] for one in container.pod.get("initContainers", ())}
        assert database == (DATABASE_URL if container.service in WITH_DATABASE and not single else "sqlite")
        assert (common.bus.address == "127.0.0.1:9092") == single
        if isinstance(own, GatewaySettings):
            assert [key.name for key in read_keys(own)] == ["agent"]
    assert seen >= {"gateway", "inference", "collector", "scorer", "registry", "trainer"}


@each_variant
def test_ports_are_those_of_the_services(variant: str) -> None:
    """The default of each, which its probe asks and its Service leads to."""
    found = objects(variant)
    ports = {}
    for container in containers(found):
        port = program(container.service).settings.model_fields["port"].default
        assert container.spec["ports"] == [{"name": container.service, "containerPort": port}]
        assert container.spec["readinessProbe"]["httpGet"] == {"path": "/health", "port": container.service}
        ports[container.service] = port
    leading = of_kind(variant, "Service").values()
    names = [one["metadata"]["labels"]["app.kubernetes.io/component"] for one in leading]
    assert {name: one["spec"]["ports"][0]["port"] for name, one in zip(names, leading, strict=True)} == ports
    assert [one["spec"]["ports"][0]["targetPort"] for one in leading] == names


@each_variant
def test_every_selector_finds_pods(variant: str) -> None:
    found = objects(variant)
    labels = [container.workload["spec"]["template"]["metadata"]["labels"] for container in containers(found)]
    for one in found:
        selectors = {"Service": ("selector",), "PodDisruptionBudget": ("selector", "matchLabels")}
        path = selectors | {"NetworkPolicy": ("podSelector", "matchLabels"), "StatefulSet": ("selector", "matchLabels")}
        wanted: Any = one["spec"] if one["kind"] in path else None
        for part in path.get(one["kind"], ()):
            wanted = wanted[part]
        assert wanted is None or any(wanted.items() <= label.items() for label in labels), one["metadata"]["name"]


def test_images_are_those_that_are_built() -> None:
    """By the compose file, and the broker's by the list of `make lock`."""
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
    composed = {container["build"]["args"]["SERVICE"] for container in ours().values()}
    assert {container.service for container in containers(objects("production"))} == composed
    assert {container.service for container in containers(objects("judge"))} == {*composed, "broker"}


def test_resources_are_those_of_the_compose_file() -> None:
    """The same limits of memory, so that a plan made with one holds for the other."""
    for container in containers(objects("claims")):
        limit = container.spec["resources"]["limits"]["memory"]
        assert limit.lower().removesuffix("i") == services()[container.service]["mem_limit"], container.label


def test_replicas_are_told_apart_and_reached(tmp_path: Path) -> None:
    for variant, url in (("claims", "http://10.0.0.7:8010"), ("default", "http://127.0.0.1:8010")):
        inference = next(one for one in containers(objects(variant)) if one.service == "inference")
        _, own = started(inference, tmp_path)
        assert isinstance(own, InferenceSettings)
        assert (own.replica_id, own.advertise_url) == ("pod-0", url)


def test_the_gate_plays_through_the_gateway(tmp_path: Path) -> None:
    for variant, host in (("claims", "headrace-gateway:8000"), ("default", "127.0.0.1:8000")):
        registry = next(one for one in containers(objects(variant)) if one.service == "registry")
        _, own = started(registry, tmp_path)
        assert isinstance(own, RegistrySettings)
        assert own.gate.base_url == f"http://{host}/v1"
        assert own.gate.environment == ("OPENAI_API_KEY",)
        assert registry.environment()["OPENAI_API_KEY"] == SECRETS["headrace-internal", "internal-key"]
        assert host.startswith("127.") or host.partition(":")[0] in of_kind(variant, "Service")


def test_names_that_look_like_numbers_stay_names(tmp_path: Path) -> None:
    trainers = [one for one in containers(objects("lineages")) if one.service == "trainer"]
    read = [started(one, tmp_path)[1] for one in trainers]
    found = {(one.model, one.lineage, one.base, one.seed) for one in read if isinstance(one, TrainerSettings)}
    assert found == {("1", "7", "/models/base", 0), ("helper", "true", "/models/second", 3)}
    judge = next(one for one in containers(objects("judge")) if one.service == "judge")
    _, own = started(judge, tmp_path)
    assert isinstance(own, JudgeSettings)
    assert own.endpoint.model == "1"
    assert own.endpoint.api_key.get_secret_value() == SECRETS["judge-endpoint", "api-key"]


def _torch(settings: InferenceSettings) -> TorchSettings:
    found = settings.of("torch")
    assert isinstance(found, TorchSettings)
    return found


def test_devices_follow_the_number_of_gpus(tmp_path: Path) -> None:
    for variant, device in (("default", "cpu"), ("gpu", "cuda"), ("production", "cuda")):
        for container in containers(objects(variant)):
            limits = container.spec["resources"].get("limits", {})
            if container.service not in ("inference", "trainer"):
                assert "nvidia.com/gpu" not in limits
                continue
            _, own = started(container, tmp_path)
            assert isinstance(own, InferenceSettings | TrainerSettings)
            chosen = _torch(own).device if isinstance(own, InferenceSettings) else own.compute.device
            assert (chosen, limits.get("nvidia.com/gpu")) == (device, 1 if device == "cuda" else None)
            assert bool(container.pod.get("nodeSelector")) == (device == "cuda")


def test_vllm_and_trinity_have_images_of_their_own(tmp_path: Path) -> None:
    found = {(variant, one.service): one for variant in OWN_VARIANTS for one in containers(objects(variant))}
    for place, image in OWN_BY_VARIANT.items():
        container = found[place]
        assert container.spec["image"].partition(":")[0].endswith(image)
        assert container.volume(container.mounts["/dev/shm"])["emptyDir"] == {"medium": "Memory"}
        gpus = container.spec["resources"]["limits"]["nvidia.com/gpu"]
        _, own = started(container, tmp_path)
        if isinstance(own, InferenceSettings):
            vllm = VllmSettings.model_validate(own.of("vllm"))
            assert (own.engine, vllm.tensor_parallel) == ("vllm", gpus)
        else:
            assert isinstance(own, TrainerSettings)
            trinity = TrinitySettings.model_validate(own.of("trinity"))
            assert (own.backend, trinity.gpus_per_node, trinity.command) == ("trinity", gpus, ("/opt/trinity-run",))
            assert trinity.folder.startswith("/var/lib/headrace/trainer/"), "a claim of its own"
    others = [one for place, one in found.items() if place not in OWN_BY_VARIANT]
    assert others
    assert not any("/dev/shm" in one.mounts for one in others)


def test_scaling_looks_at_every_topic_of_the_service() -> None:
    scaled = of_kind("production", "ScaledObject")
    assert scaled.keys() == {"headrace-collector", "headrace-scorer"} <= of_kind("production", "Deployment").keys()
    for name, one in scaled.items():
        service = name.removeprefix("headrace-")
        triggers = [trigger["metadata"] for trigger in one["spec"]["triggers"]]
        read = {topic.name: topic for topic in catalogue().values() if service in topic.consumers}
        assert {trigger["topic"] for trigger in triggers} == read.keys()
        assert {trigger["consumerGroup"] for trigger in triggers} == {f"headrace-{service}"}
        assert one["spec"]["maxReplicaCount"] <= min(topic.partitions for topic in read.values())
        assert "replicas" not in of_kind("production", "Deployment")[name]["spec"]
    assert of_kind("claims", "ScaledObject") == {}


@pytest.mark.parametrize(
    ("variable", "value", "said"),
    [
        ("HEADRACE_COLLECTOR__PROT", "1", "did you mean 'port'"),
        ("HEADRACE_BUS__ADRESS", "kafka:9092", "did you mean 'address'"),
        ("HEADRACE_GATEWAY_PORT", "tcp://10.0.0.1:8000", "gateway_port"),
    ],
)
def test_a_variable_that_is_no_setting_is_noticed(variable: str, value: str, said: str, tmp_path: Path) -> None:
    """The last one is what Kubernetes itself adds where service links are on."""
    container = next(one for one in containers(objects("claims")) if one.service == "collector")
    container.spec["env"].append({"name": variable, "value": value})
    with pytest.raises(SettingError, match=said):
        started(container, tmp_path)


def test_settings_reach_the_services(tmp_path: Path) -> None:
    container = next(one for one in containers(objects("production")) if one.service == "scorer")
    assert yaml.safe_load((ROOT / "deploy/helm/headrace/values-production.yaml").read_text())["settings"]
    _, own = started(container, tmp_path)
    assert own.model_dump()["required"] == ("function:answer",)
    assert values()["settings"] == ""
