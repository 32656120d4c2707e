"""Tests of the console on running stacks: pages in a real browser, decisions, reasons for missing training, kills;
and its pictures.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog
from PIL import Image

from headrace_operations.supervisor import read
from headrace_schemas.http.stack_access import make_login_token
from tests.console import causes, kills, stack, walk
from tests.support import presence, tiny_model
from tests.system.program import Line, Program, Run, at_most

PARTS: dict[str, Callable[[Path, Path], Iterator[Line]]] = {
    "browser": walk.lines,
    "pairs": stack.pair_lines,
    "hostile": stack.hostile_lines,
    "causes": causes.lines,
    "kills": kills.lines,
}
"""Parts by name. Each part gets its own folder and the folder of a base model."""
_WITHOUT_BROWSER = ("causes", "kills")
_PICTURE_BYTES_MAX = 100_000
BROWSER = Path(__file__).with_name("browser.py")
PICTURES = (("console", "/", 664),)
"""Name of the file, path of the page, and height of the screenshot in CSS pixels."""
_WIDTH, _SCALE, _COLOURS = 1000, 1.5, 48


def play(run: Run) -> None:
    if run.options.pictures is not None:
        paths = take_pictures(run.options.pictures, run.options.data_dir)
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


def take_pictures(folder: Path, data_dir: Path) -> list[Path]:
    """Write screenshots of the stack with the data directory `data_dir` to `folder`, in the light theme and with few
    colours.
    """
    task = {
        "task": "pictures",
        "url": read(data_dir).services["console"].url,
        "login": f"/login?token={make_login_token(data_dir)}",
        "pictures": PICTURES,
        "folder": str(folder.absolute()),
        "width": _WIDTH,
        "scale": _SCALE,
    }
    paths = [Path(path) for path in presence.drive(BROWSER, task)["written"]]
    for path in paths:
        with Image.open(path) as picture:
            reduced = picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
        reduced.save(path, optimize=True)
    return paths
