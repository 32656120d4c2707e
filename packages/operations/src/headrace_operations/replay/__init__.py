"""Training again on events that the topics still contain: `headrace replay plan | run`. See docs/replay.md.

A replay reads ranges without a consumer group. Programs of the services judge and score the records and simulate the
training. The result is written to topics of the replay, on which a trainer trains a new lineage. Live groups, topics
and offsets are not changed.
"""
