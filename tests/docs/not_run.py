"""The fences that no test runs, and why: the only place where one may be left out."""

from __future__ import annotations

from tests.docs.fences import ROOT, RUN, Fence, all_fences, tutorials

_DEMO = "takes minutes; tests/e2e plays the shortened demo"
NOT_RUN = {
    ("README.md", "pip install"): "tests/integration/test_wheels.py installs the built wheels and plays the demo",
    (
        "packages/headrace/README.md",
        "pip install",
    ): "tests/integration/test_wheels.py installs the built wheels and plays the demo",
    ("README.md", "headrace up"): "runs until Ctrl-C; the stack of the other fences is started with exactly this file",
    ("deploy/README.md", "cp .env.example"): "builds images and starts containers; `make check NAME=compose` does that",
    ("examples/email_agent/README.md", "make demo"): _DEMO,
    (
        "examples/math_agent/README.md",
        "make example NAME=math",
    ): "takes up to ten minutes; its parts are tested in tests/unit",
    (
        "examples/werewolf/README.md",
        "make example NAME=werewolf",
    ): "takes up to twelve minutes; its parts are tested in tests/unit",
    (
        "examples/smollm2/README.md",
        "pip install",
    ): "needs a package of 93 MB and 20 minutes; tests/unit/smollm2 tests its parts",
    ("examples/werewolf/README.md", "cd examples\nOPENAI_API_KEY"): "needs somebody else's server",
    (
        "examples/werewolf/README.md",
        "cd examples\npython -m werewolf.ablation",
    ): "tests/unit/werewolf plays it; the target holds its lines",
    ("examples/math_agent/README.md", "cd examples"): "needs somebody else's server",
    (
        "examples/email_search/README.md",
        "make example NAME=email",
    ): "takes up to eight minutes; its parts are tested in tests/unit",
    ("examples/email_search/README.md", "cd examples"): "needs somebody else's server",
    ("examples/email_agent/README.md", "cd examples"): "needs somebody else's server",
    ("examples/email_agent/README.md", "export PYTHONPATH"): f"runs until Ctrl-C; what the demo does, and that {_DEMO}",
}
"""Page and beginning of the fence to the reason."""


def key_of(fence: Fence) -> tuple[str, str] | None:
    """Return the entry that excludes the fence; None when it is run."""
    return next((key for key in NOT_RUN if fence.page == key[0] and fence.text.startswith(key[1])), None)


def executed(*, stack: bool) -> list[Fence]:
    """Return the program fences that run: those with a running Headrace, or the others.

    Fences of a page that is walked run there (`test_tutorials.py`).
    """
    walked = {str(page.relative_to(ROOT)) for page in tutorials()}
    candidates = [fence for fence in all_fences() if fence.language in RUN and fence.page not in walked]
    return [fence for fence in candidates if fence.needs_stack == stack and not key_of(fence)]
