"""Tests of the console on running stacks: pages in a real browser, decisions, reasons for missing training, kills."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from tests.console import causes, kills, memory_stack, pictures, walk
from tests.support import presence, tiny_model
from tests.system.program import Line, Program, Run, at_most

PARTS: dict[str, Callable[[Path, Path], Iterator[Line]]] = {
    "browser": walk.lines,
    "pairs": memory_stack.pair_lines,
    "hostile": memory_stack.hostile_lines,
    "causes": causes.lines,
    "kills": kills.lines,
}
"""Parts by name. Each part gets its own folder and the folder of a base model."""
_WITHOUT_BROWSER = ("causes", "kills")
_PICTURE_BYTES_MAX = 100_000


def play(run: Run) -> None:
    if run.options.pictures is not None:
        paths = pictures.take(run.options.pictures, run.options.data_dir)
        run.add(*(at_most(f"bytes of {path.name}", path.stat().st_size, _PICTURE_BYTES_MAX) for path in paths))
        return
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    base = tiny_model.build(run.folder / "base", seed=run.seed % 1000)
    for name in run.options.only:
        if name not in _WITHOUT_BROWSER and (reason := presence.missing_browser()):
            run.skip(f"{name}, in a browser", reason)
            continue
        run.add_all(PARTS[name](run.folder / name, base))


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="parts (default: all)")
    parser.add_argument("--pictures", type=Path, help="only write pictures of a running stack into this folder")
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(".headrace/demo"),
        help="data directory of that stack (default: %(default)s)",
    )


PROGRAM = Program("Open the console of running stacks in a browser.", play, _add_arguments)
