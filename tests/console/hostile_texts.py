"""Sixty hostile texts: HTML, SVG, htmx attributes, templates, bidirectional and control characters, long lines, base64.

A text that a browser executes sets `window.executed` or requests `http://other.example`.
"""

from __future__ import annotations

import base64

_RUN = "window.executed=1"
_FOREIGN = "http://other.example/x"
_HTML = (
    f"<script>{_RUN}</script>",
    f"</pre></main><script>{_RUN}</script>",
    f"</title></head><body onload={_RUN}>",
    f"</textarea><script>{_RUN}</script>",
    f'"><script>{_RUN}</script>',
    f"'><img src=x onerror={_RUN}>",
    f"<img src={_FOREIGN}>",
    f"<img src=x onerror={_RUN}>",
    f"<iframe src={_FOREIGN}></iframe>",
    f"<iframe srcdoc='<script>parent.{_RUN}</script>'></iframe>",
    f"<object data={_FOREIGN}></object>",
    f"<embed src={_FOREIGN}>",
    f"<link rel=stylesheet href={_FOREIGN}>",
    f"<style>@import '{_FOREIGN}'; body {{ display: none }}</style>",
    "<p style='position:fixed;inset:0;background:red'>x</p>",
    f"<base href={_FOREIGN}>",
    f"<meta http-equiv=refresh content='0;url={_FOREIGN}'>",
    f"<form action={_FOREIGN}><button>Log in</button></form>",
    f"<a href='javascript:{_RUN}'>x</a>",
    f"[x](javascript:{_RUN})",
    f"![x]({_FOREIGN})",
    f"<details open ontoggle={_RUN}>",
    f"<input autofocus onfocus={_RUN}>",
    f"<video src={_FOREIGN} onerror={_RUN}></video>",
    f"<body background={_FOREIGN}>",
    f"<!--><script>{_RUN}</script>-->",
    f"<scr<script>ipt>{_RUN}</scr</script>ipt>",
    f"<SCRIPT\x0c>{_RUN}</SCRIPT\t>",
    f"&lt;script&gt;{_RUN}&lt;/script&gt;",
    f"&#60;script&#62;{_RUN}&#60;/script&#62;",
    f"\uff1cscript\uff1e{_RUN}\uff1c/script\uff1e",
    f"<template><script>{_RUN}</script></template>",
    f"<math><mtext></table><mglyph><style><img src=x onerror={_RUN}>",
)
_SVG = (
    f"<svg onload={_RUN}>",
    f"<svg><script>{_RUN}</script></svg>",
    f"<svg><use href='{_FOREIGN}#x'/></svg>",
    f"<svg><animate onbegin={_RUN} attributeName=x dur=1s>",
    f"<svg><foreignObject><img src=x onerror={_RUN}></foreignObject></svg>",
)
_HTMX = (
    f"<div hx-get='{_FOREIGN}' hx-trigger='load'>x</div>",
    "<button hx-post='/logout' hx-trigger='load'>x</button>",
    f"<div hx-on:load='{_RUN}'>x</div>",
    f"<div data-live='loop' id='live' hx-get='{_FOREIGN}'>x</div>",
    "<button aria-keyshortcuts='1' data-key='g l' name='answer' value='bad'>x</button>",
    "<hx-partial hx-target='body'>x</hx-partial>",
)
_TEMPLATES = (
    "{{ 7 * 7 }}{{ config }}{% for x in ().__class__.__mro__ %}{{ x }}{% endfor %}",
    "${7*7} #{7*7} <%= 7*7 %>",
    "%(user)s %s {0.__class__} {user.form_token}",
)
_CHARACTERS = (
    "\u202egnp.exe\u202d\u2066x\u2069",
    "\x1b[31mred\x1b]0;title\x07\x1b[2J",
    "\x9b2J\x7f\x08\x08\x08",
    "\u200b\u2028\u2029\ufeff\ufffe\U000e0001",
    "Z" + "\u0335" * 400,
    "\r\nSet-Cookie: x=1\r\n\r\n<script>window.executed=1</script>",
    "a\rb\x0bc\x0cd",
    "../../etc/passwd%00%ud83d",
)
_LONG = (
    "x" * 5_000_000,
    "<b>" * 1_700_000,
    "\u202e\x1b" * 500_000,
    "data:image/png;base64," + base64.b64encode(bytes(700_000)).decode(),
    f"data:text/html;base64,{base64.b64encode(f'<script>{_RUN}</script>'.encode()).decode()}",
)
TEXTS = (*_HTML, *_SVG, *_HTMX, *_TEMPLATES, *_CHARACTERS, *_LONG)
