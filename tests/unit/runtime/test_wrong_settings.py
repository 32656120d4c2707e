"""Any settings file is read, or refused in one sentence that names the setting."""

from __future__ import annotations

import asyncio
import codecs
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from headrace_broker.settings import BrokerSettings
from headrace_collector.settings import CollectorSettings
from headrace_gateway.settings import GatewaySettings
from headrace_inference.settings import InferenceSettings
from headrace_judge.settings import JudgeSettings
from headrace_registry.settings import RegistrySettings
from headrace_runtime import check
from headrace_runtime.errors import SettingError
from headrace_runtime.settings.sections import Common, ServiceSettings, _plain_types, load
from headrace_runtime.settings.table import parse_toml
from headrace_runtime.storage.files import data_folder
from headrace_scorer.settings import ScorerSettings
from headrace_trainer.settings import TrainerSettings

WRONG = [
    "true",
    "inf",
    "-inf",
    "nan",
    "9" * 30,
    "-" + "9" * 30,
    '"\\u0000"',
    "[]",
    "[true]",
    "{}",
    "1e400",
    "-1",
    '"x"',
]
WRONG += ["1979-05-27T07:32:00Z", '"\\u001b[31m"', '["a", 1, true]', "9" * 5000, "[" * 50 + "]" * 50]
MODELS: dict[str, type[ServiceSettings]] = {
    "broker": BrokerSettings,
    "collector": CollectorSettings,
    "gateway": GatewaySettings,
    "inference": InferenceSettings,
    "judge": JudgeSettings,
    "registry": RegistrySettings,
    "scorer": ScorerSettings,
    "trainer": TrainerSettings,
}


def names(model: type[BaseModel], prefix: str = "") -> list[tuple[str, set[Any]]]:
    setting_names = []
    for name, field in model.model_fields.items():
        kinds = _plain_types(field.annotation)
        inner = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        setting_names.append((prefix + name, kinds))
        for section in inner if field.annotation in inner else ():
            setting_names += names(section, f"{prefix}{name}.")
    return setting_names


SETTINGS = [("gateway", name, kinds) for name, kinds in names(Common)]
SETTINGS += [(service, name, kinds) for service, model in MODELS.items() for name, kinds in names(model, f"{service}.")]


def read(tmp_path: Path, content: bytes, service: str = "gateway") -> str | None:
    """Return the sentence of the refusal, or None."""
    path = tmp_path / "headrace.toml"
    path.write_bytes(content)
    try:
        load(service, MODELS[service], path, {})
    except SettingError as error:
        return str(error)
    return None


@pytest.mark.parametrize(("service", "name", "kinds"), SETTINGS, ids=[name for _, name, _ in SETTINGS])
def test_a_wrong_value_is_a_sentence(tmp_path: Path, service: str, name: str, kinds: set[Any]) -> None:
    for value in WRONG:
        sentence = read(tmp_path, f"{name} = {value}\n".encode(), service)
        if sentence is not None:
            assert name.split(".")[0] in sentence or "config" in sentence
            assert sentence.isprintable() or "\n" in sentence, sentence
            assert len(sentence) < 4_000
        if kinds & {int, float}:
            impossible = {"inf", "-inf", "nan", "1e400", "9" * 30, "-" + "9" * 30, "9" * 5000}
            impossible |= set() if bool in kinds else {"true"}
            assert value not in impossible or sentence, f"{name} = {value[:20]} is accepted"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (codecs.BOM_UTF8 + b"[gateway]\nport = 8100\n", None),
        (b"[gateway]\r\nport = 8100\r\n", None),
        ("[gateway]\nport = 8100\n".encode("utf-16"), "UTF-16"),
        ("[gateway]\nport = 8100\n".encode("utf-16-le"), "UTF-16"),
        ('data_dir = "/tmp/müller"\n'.encode("latin-1"), "Latin-1"),
        (b"\xff\xfe\x00", "UTF-16"),
        (b"[gateway", "not valid TOML"),
        (b"a = " + b"[" * 100_000, "not valid TOML"),
        (b"a = " + b"9" * 5_000, "not valid TOML"),
        (bytes(range(128, 256)), "UTF-8"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_file_in_any_encoding_is_read_or_named(tmp_path: Path, content: bytes, words: str | None) -> None:
    sentence = read(tmp_path, content)
    assert (sentence is None) == (words is None), sentence
    if words and sentence:
        assert words in sentence


def test_a_byte_order_mark_changes_nothing() -> None:
    text = b"[gateway]\nport = 8100\n"
    assert parse_toml(codecs.BOM_UTF8 + text) == parse_toml(text) == {"gateway": {"port": 8100}}


@pytest.mark.parametrize(
    "folder",
    ["/proc/x", "/proc/self/x/y", "/dev/null", "/dev/null/x", "{file}", "{file}/x", "/" + "x" * 300, "/a\x00b"],
)
def test_an_impossible_data_dir_is_a_sentence(tmp_path: Path, folder: str) -> None:
    (tmp_path / "file").write_text("x")
    path = Path(folder.format(file=tmp_path / "file"))
    problems = asyncio.run(check.find_problems("gateway", Common(data_dir=path), None, None, bus=False))
    assert any(sentence.startswith("setting data_dir") for sentence in problems), problems
    with pytest.raises(SettingError, match="setting data_dir"):
        data_folder(path)
