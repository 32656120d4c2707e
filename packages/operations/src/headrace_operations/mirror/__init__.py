"""Copy of one bus to another: topics, records and positions of consumer groups. It moves an installation to another
bus.

Records keep their offsets, because services store offsets in places that a copy of the bus does not include: their
databases, the checkpoints of the trainer, dead letters. Therefore

- a log that no longer begins at 0 gets as many padding records, which are deleted before the first real record;
- an offset inside a log that has no record (the end of a transaction) gets a duplicate of the record before it, which
  consumers discard by its id, as after a producer's retry;
- a copy continues at the end of the target's log, and no other state is needed.

A compacted topic is a table: its newest rows are copied, and positions in it are translated.
"""

from headrace_operations.mirror.run import MirrorResult, mirror

__all__ = ["MirrorResult", "mirror"]
