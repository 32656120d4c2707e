"""One stack for all pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.docs.stack import Stack, running


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("stack")) as started:
        yield started
