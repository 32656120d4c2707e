"""Settings are in tiers: few that users set, which the pages show as the services say them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_operations.settings_reference import Described, as_toml, describe_settings
from headrace_operations.supervisor.plan import installed
from tests.repo.compose_files import ROOT

COMMON_MAX = 40
HEADRACE = str(Path(sys.executable).with_name("headrace"))


@pytest.fixture(scope="module")
def described() -> Described:
    return describe_settings(installed())


def test_few_settings_are_common(described: Described) -> None:
    tiers = [setting.tier for settings in described.values() for setting in settings]
    assert set(tiers) == {"common", "tuning", "limits"}
    assert tiers.count("common") <= COMMON_MAX


def test_the_page_shows_the_common_ones(described: Described) -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text(encoding="utf-8")
    assert f"```toml\n{as_toml(described, tier='common')}```" in page, "paste: headrace config reference --tier common"


def test_a_section_stands_once_in_the_reference(described: Described) -> None:
    """Tiers are an order inside a table: TOML takes no table twice."""
    tables = re.findall(r"^\[[\w.]+\]$", as_toml(described), re.MULTILINE)
    assert len(set(tables)) == len(tables)


def test_init_writes_what_users_set_and_overwrites_nothing(tmp_path: Path) -> None:
    command = [HEADRACE, "config", "init", "mine.toml", "--base", "models/mine", "--model", "helper"]
    for status in (0, 2):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == status, done.stderr
    assert "mine.toml: exists already" in done.stderr
    text = (tmp_path / "mine.toml").read_text(encoding="utf-8")
    assert 'base = "models/mine"' in text.splitlines()
    assert 'model = "helper"' in text.splitlines()
    assert "#learning_rate = ..." in text
    assert "spool_bytes_max" not in text
