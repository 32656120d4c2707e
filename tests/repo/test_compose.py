"""Tests of docker-compose.yml, of proxies, and of monitoring files (also run by `make check NAME=compose`).

Each container has its required parts and valid settings. Clients of our own services ignore proxy variables, because a
proxy would see their keys. Dashboards, alerts and scrape targets name existing metrics, labels, services and ports.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY
from prometheus_client.metrics import MetricWrapperBase

from headrace.client import Client
from headrace.registry import ModelRegistry
from headrace_gateway.access.keys import read_keys
from headrace_gateway.settings import GatewaySettings
from headrace_inference.settings import InferenceSettings
from headrace_runtime.main import Service as Program
from headrace_runtime.services import ServiceInfo, installed_services
from headrace_runtime.settings.sections import Common, ServiceSettings, is_loopback, load
from headrace_trainer.settings import TrainerSettings
from headrace_trainer.trinity_learner.configuration import TrinitySettings
from tests.repo.deployments import COMPOSE_SECRETS as SECRETS
from tests.repo.deployments import (
    EXAMPLE,
    MAIN,
    OWN_IMAGES,
    ROOT,
    env_example,
    filled,
    image_of,
    ours,
    service_of,
    services,
    variables,
)
from tests.unit.cli.doubles import HttpFake

INSTALLED = installed_services()
NO_PROGRAM_TO_CHECK_WITH = {"otel-collector"}
RESOURCES = {"inference": "INFERENCE", "trainer": "TRAINER", "collector": "COLLECTOR", "gateway": "GATEWAY"}
each_service = pytest.mark.parametrize("name", services())
each_of_ours = pytest.mark.parametrize("name", ours())


def announced(container: str) -> ServiceInfo:
    return INSTALLED[service_of(container)]


def program(container: str) -> Program[Any]:
    definition: Program[Any] = import_module(f"{announced(container).module}.__main__").SERVICE
    return definition


def settings_of(container: str, **values: str) -> tuple[Common, ServiceSettings]:
    """Load the settings with which the container would start.

    Raises:
        SettingError: the container would refuse to start.
    """
    environ = {name: str(value) for name, value in services(**values)[container]["environment"].items()}
    return load(service_of(container), program(container).settings, ROOT / env_example()["SETTINGS_FILE"], environ)


@each_service
def test_every_container_is_checked_limited_and_bounded(name: str) -> None:
    service = services()[name]
    assert service["mem_limit"]
    assert float(service["cpus"]) > 0
    assert service["logging"]["options"]["max-size"]
    assert service["restart"] == "unless-stopped"
    assert ("healthcheck" in service) != (name in NO_PROGRAM_TO_CHECK_WITH)


@each_service
def test_what_is_published_is_published_on_loopback(name: str) -> None:
    for port in services()[name].get("ports", []):
        assert is_loopback(port.split(":")[0]), port


@each_of_ours
def test_a_container_of_ours_has_its_own_image_and_no_more_rights_than_it_needs(name: str) -> None:
    service = services()[name]
    assert service["image"] == image_of(name)
    assert service["build"]["args"]["SERVICE"] == service_of(name)
    assert (ROOT / service["build"]["args"]["FOLDER"] / "src" / announced(name).module).is_dir()
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges"]
    assert service["depends_on"]["kafka"] == {"condition": "service_healthy"}


@each_of_ours
def test_the_data_folder_can_be_written(name: str) -> None:
    """The image's root file system is read-only, and a service that cannot write to `data_dir` is never ready."""
    assert "/var/lib/headrace" in services()[name]["tmpfs"]


@each_of_ours
def test_the_check_asks_the_port_that_the_service_listens_on(name: str) -> None:
    assert services()[name]["healthcheck"]["test"][-1] == str(announced(name).port)


@each_of_ours
def test_every_setting_is_one_that_the_service_starts_with(name: str) -> None:
    common, settings = settings_of(name, JUDGE_BASE_URL="http://judge/v1", JUDGE_MODEL="1")
    assert settings.host == "0.0.0.0"
    assert common.bus.address == "kafka:9092"
    assert common.security.internal_key.get_secret_value() == SECRETS["INTERNAL_KEY"], "a key of digits is still text"
    has_state = announced(name).database
    assert common.database.url.get_secret_value().startswith("postgresql://" if has_state else "sqlite")
    assert ("postgres" in services()[name]["depends_on"]) == has_state


def test_the_gateway_asks_for_the_agents_key() -> None:
    _, settings = settings_of("gateway")
    assert isinstance(settings, GatewaySettings)
    assert [key.sha256 for key in read_keys(settings)] == [SECRETS["GATEWAY_KEY_SHA256"]]


def test_every_service_but_the_embedded_broker_has_a_container() -> None:
    assert {service_of(name) for name in ours()} == {name for name, info in INSTALLED.items() if not info.is_bus}


@pytest.mark.parametrize("name", RESOURCES)
def test_inference_training_and_collection_have_limits_of_their_own(name: str) -> None:
    values = {f"{RESOURCES[name]}_MEMORY": "123m", f"{RESOURCES[name]}_CPUS": "0.123"}
    changed = {other for other, service in services(**values).items() if service["mem_limit"] == "123m"}
    assert {service_of(other) for other in changed} == {name}
    assert float(services(**values)[name]["cpus"]) == 0.123


@pytest.mark.parametrize("name", ["inference", "trainer"])
def test_the_gpu_profile_replaces_the_cpu_profile(name: str) -> None:
    cpu, gpu = services()[name], services()[f"{name}-gpu"]
    assert cpu["profiles"] == ["cpu"]
    assert "gpu" in gpu["profiles"]
    assert (cpu["image"], cpu["volumes"]) == (gpu["image"], gpu["volumes"])
    assert name in gpu["networks"]["default"]["aliases"], "Prometheus finds it by this name"
    assert gpu["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]


@pytest.mark.parametrize("profile", ["cpu", "gpu", "vllm", "trinity"])
def test_a_profile_has_one_that_serves_and_one_that_trains(profile: str) -> None:
    chosen = {name: service for name, service in services().items() if profile in service.get("profiles", ())}
    assert sorted(map(service_of, chosen)) == ["inference", "trainer"]
    for name, service in chosen.items():
        aliases = service["networks"]["default"]["aliases"] if "networks" in service else [name]
        assert service_of(name) in aliases, "Prometheus finds it by this name"
        assert ("deploy" in service) == (profile != "cpu")


@pytest.mark.parametrize("name", OWN_IMAGES)
def test_what_is_compiled_at_the_start_can_be_loaded(name: str) -> None:
    """By default, a tmpfs refuses programs and libraries, but Triton's are in /tmp. Workers use shared memory."""
    assert "/tmp:exec" in services()[name]["tmpfs"]
    assert services()[name]["shm_size"]


def test_an_image_of_its_own_computes_with_what_is_in_it() -> None:
    _, serving = settings_of("inference-vllm")
    assert isinstance(serving, InferenceSettings)
    assert serving.engine == "vllm"
    _, training = settings_of("trainer-trinity")
    assert isinstance(training, TrainerSettings)
    assert training.backend == "trinity"
    trinity = TrinitySettings.model_validate(training.of("trinity"))
    program, volumes = Path(trinity.command[0]), services()["trainer-trinity"]["volumes"]
    assert (program.parent, (ROOT / "deploy" / program.name).exists()) == (Path("/opt"), True)
    assert any(trinity.folder.startswith(volume.split(":")[1] + "/") for volume in volumes if "trainer" in volume)


def test_env_example_explains_every_variable_and_no_other() -> None:
    used = variables(MAIN) | variables(EXAMPLE)
    assert set(env_example()) == set(used) | {"COMPOSE_PROFILES", "COMPOSE_FILE"}


def test_env_example_shows_the_defaults() -> None:
    """Variables that the file sets on purpose are exempt: those of the example, and required ones."""
    chosen = {"SETTINGS_FILE", "EXTRA_PACKAGES"}
    for name, default in (variables(MAIN) | variables(EXAMPLE)).items():
        if default is not None and name not in chosen:
            assert env_example()[name] == default, name


def test_the_secrets_of_env_example_are_empty() -> None:
    required = {name for name, default in variables(MAIN).items() if default is None}
    assert required == {*SECRETS, "BASE_MODEL"}
    assert all(not env_example()[name] for name in SECRETS)


def test_the_example_builds_its_base_where_the_trainer_looks_for_it() -> None:
    example = filled(EXAMPLE)["services"]
    base, trainer = example["email-agent-base"], services()["trainer"]
    assert base["image"] == trainer["image"]
    assert trainer["environment"]["HEADRACE_TRAINER__BASE"] in base["entrypoint"][-1]
    assert example["trainer"]["depends_on"] == {"email-agent-base": {"condition": "service_completed_successfully"}}
    for name in ("SETTINGS_FILE", "CODE_DIR", "EXTRA_PACKAGES", "PIP_CONFIG"):
        assert (ROOT / env_example()[name]).exists(), name
    for file in env_example()["COMPOSE_FILE"].split(":"):
        assert yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))


CLIENTS = {"Client", "AsyncClient", "get", "post", "request", "stream"}
CLIENTS |= {"DefaultHttpxClient", "DefaultAsyncHttpxClient"}
LIBRARIES = {"httpx", "httpx2", "openai"}
NOT_OURS = {
    "services/judge/src/headrace_judge/endpoint.py": "a judge's endpoint is anywhere; not where it is a gateway"
}


def test_every_client_ignores_proxies() -> None:
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    folders = ("packages/", "services/", "gateway/", "examples/", "tests/support/")
    wrong = []
    for path in (path for path in listed.split() if path.startswith(folders)):
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = ast.unparse(node.func)
            library, _, function = name.rpartition(".")
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            opens = (library in LIBRARIES and function in CLIENTS) or name == "DefaultAsyncHttpxClient"
            direct = words.get("trust_env") == "False" or "MockTransport" in words.get("transport", "")
            if (
                name in ("urllib.request.urlopen", "aiohttp.request")
                or words.get("trust_env") == "True"
                or (opens and not direct and path not in NOT_OURS)
            ):
                wrong.append(f"{path}:{node.lineno}")
    assert wrong == []


@pytest.mark.parametrize("proxy", ["http://127.0.0.1:9", "socks5://127.0.0.1:9", "nonsense://x", "127.0.0.1"])
def test_a_proxy_of_the_environment_changes_nothing(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, proxy)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    fake = HttpFake()
    try:
        fake.answer("GET", "/v1/models", {"object": "list", "data": []})
        with ModelRegistry(fake.url) as registry:
            assert registry.models() == ()
        Client(fake.url).close()
    finally:
        fake.stop()


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
    """Return the labels of every metric of our services by metric name."""
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
    """Return every query of a dashboard or of the alerts, with the text that names its labels."""
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
