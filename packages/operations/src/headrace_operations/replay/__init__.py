"""Training again from what the topics still hold: `headrace replay plan | run`. See docs/replay.md.

A replay reads ranges without a consumer group, has the services' own programs judge and score what it read, and make a
dry run of training with it, writes the outcome to topics of its own and lets a trainer make a new lineage of it.
Nothing live is read from them, written to or committed to.
"""
