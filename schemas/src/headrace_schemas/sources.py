"""Names of reward sources that only one service may use, so that nobody else can give rewards in its name."""

from __future__ import annotations

import unicodedata

RESERVED: dict[str, str] = {"function": "scorer", "learned": "scorer", "judge": "judge"}
"""First word of a source, before its colon, to the service that alone gives rewards under it."""
FROM_FEEDBACK = "feedback"
"""First word of the default source of feedback. Rewards under it come from the scorer, which reads the feedback."""

_COLONS = ":\u02d0\u02f8\u0589\u05c3\u0703\u0704\u16ec\u1803\u1809\u205a\u2236\ua789\ufe30"
"""The colon, and characters that are drawn like it."""
_LOOKALIKES = {
    "a": "\u0430\u0251\u03b1",
    "c": "\u0441\u03f2\u1d04",
    "d": "\u0501\u1d05",
    "e": "3\u0435\u0454\u03b5\u1d07",
    "f": "\u0192",
    "g": "\u0261\u0581",
    "i": "\u0456\u0131\u03b9",
    "j": "\u0458\u03f3\u1d0a",
    "l": "1|\u04cf\u01c0",
    "n": "\u0578\u043f\u03b7\u0438",
    "o": "0\u043e\u03bf\u0585\u1d0f",
    "r": "\u0433\u1d26",
    "t": "\u0442\u03c4",
    "u": "\u057d\u03c5\u1d1c",
}
"""Letters of the reserved words to digits and to Cyrillic, Greek, Armenian and Latin letters drawn like them."""
_PLAIN = str.maketrans({alike: letter for letter, others in _LOOKALIKES.items() for alike in others})


def owner_of(source: str) -> str | None:
    """Return the service that alone may give rewards as `source` or as one of its metrics; None: everybody may."""
    return RESERVED.get(_split(source)[0])


def giver_of(source: str) -> str | None:
    """Return the service that alone sends rewards of `source`; None: other producers send them.

    That are the reserved sources, and `feedback` with its metrics, which the scorer computes from feedback.
    """
    word = _split(source)[0]
    return "scorer" if word == FROM_FEEDBACK else RESERVED.get(word)


def refusal_of(name: str, *, whole_word: bool = True) -> str | None:
    """Return why callers must not use `name`; None if they may.

    Args:
        whole_word: whether a reserved word alone is refused, too: a metric would complete a source of that name.
    """
    word, has_colon = _split(name)
    if word not in RESERVED or not (whole_word or has_colon):
        return None
    words = ", ".join(sorted(RESERVED))
    return f"is reserved for the {RESERVED[word]}; use a name of your own that begins with none of {words}"


def _split(source: str) -> tuple[str, bool]:
    """Return the word before the first colon, in plain lower-case letters, and whether there is a colon."""
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", source.translate(_PLAIN)).casefold())
    at = next((at for at, character in enumerate(folded) if character in _COLONS), len(folded))
    shown = (character for character in folded[:at] if unicodedata.category(character)[0] not in "CMZ")
    return "".join(shown).translate(_PLAIN), at < len(folded)
