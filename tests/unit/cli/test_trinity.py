"""`headrace trinity convert`."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from headrace_cli.app import app
from tests.docs.settings import check
from tests.parity.oracles import EXPLORER, TRAINER


def convert(folder: Path, *words: str, **changed: object) -> tuple[int, str]:
    (folder / "explorer.yaml").write_text(yaml.safe_dump(EXPLORER))
    (folder / "trainer.yaml").write_text(yaml.safe_dump({**TRAINER, **changed}))
    result = CliRunner().invoke(app, ["trinity", "convert", "explorer.yaml", "trainer.yaml", *words])
    return result.exit_code, result.output


def test_both_files_become_settings_that_services_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, output = convert(tmp_path)
    assert status == 0
    assert "explorer.rollout_model.engine_num" in output
    check((tmp_path / "headrace.toml").read_text(), tmp_path)
    status, output = convert(tmp_path)
    assert status == 2
    assert "exists already" in output


def test_an_unknown_key_is_named_and_no_file_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    status, output = convert(tmp_path, "--out", "other.toml", synchronizer={"sync_method": "nccl"}, surprise=1)
    assert status == 2
    assert "synchronizer.sync_method = 'nccl'" in output
    assert "surprise = 1" in output
    assert not (tmp_path / "other.toml").exists()


@pytest.mark.parametrize("text", ["{", "[1, 2]"])
def test_a_file_that_is_no_table_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.yaml").write_text(text)
    assert CliRunner().invoke(app, ["trinity", "convert", "one.yaml"]).exit_code == 2
    assert CliRunner().invoke(app, ["trinity", "convert", "none.yaml"]).exit_code == 2
