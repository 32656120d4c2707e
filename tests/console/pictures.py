"""Screenshots of the console for the documentation, from a running stack such as `headrace demo --keep-running`."""

from __future__ import annotations

from pathlib import Path

from PIL import Image

from headrace_operations.supervisor import read
from headrace_schemas.http.stack_access import make_login_token
from tests.support import presence

PROGRAM = Path(__file__).with_name("browser.py")
PICTURES = (("console", "/", 664),)
"""Name of the file, path of the page, and height of the screenshot in CSS pixels."""
_WIDTH, _SCALE, _COLOURS = 1000, 1.5, 48


def take(folder: Path, data_dir: Path) -> list[Path]:
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
    paths = [Path(path) for path in presence.drive(PROGRAM, task)["written"]]
    for path in paths:
        with Image.open(path) as picture:
            reduced = picture.convert("RGB").quantize(_COLOURS, dither=Image.Dither.NONE)
        reduced.save(path, optimize=True)
    return paths
