"""Vocabulary of mailboxes. Every mailbox uses all words; the seed determines how they are combined."""

from __future__ import annotations

PROJECTS = (
    "harbor", "falcon", "maple", "summit", "copper", "meadow", "lantern", "comet", "river", "cedar", "anchor", "prism",
    "garnet", "willow", "canyon", "ember", "glacier", "orchid", "saturn", "tundra", "velvet", "walnut", "zephyr",
    "bison", "cobalt", "delta", "fjord", "heron", "indigo", "jasper", "kestrel", "lotus",
)  # fmt: skip
MATTERS = ("budget", "contract", "launch", "audit", "hiring", "training", "travel", "design")
FIRST_NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jonas", "Karin", "Leon", "Mia", "Nora",
    "Oscar", "Paula", "Quinn", "Rosa", "Simon", "Tara",
)  # fmt: skip
LAST_NAMES = (
    "Adler", "Berg", "Costa", "Dunn", "Engel", "Frank", "Grant", "Holm", "Ivers", "Jung", "Klein", "Lund", "Marsh",
    "Nolan", "Olsen", "Price", "Reed", "Stone", "Turner", "Weiss",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday")
FILES = (
    "agenda", "brief", "chart", "draft", "figures", "guide", "letter", "minutes", "notes", "offer", "plan", "poster",
    "report", "sketch", "slides", "summary", "table", "timeline",
)  # fmt: skip
REPLIES = ("Thank you, I will be there.", "Fine with me.", "I cannot come, sorry.", "Please send me the notes.")
ALL = (*PROJECTS, *MATTERS, *FIRST_NAMES, *LAST_NAMES, *DAYS, *FILES)
