"""Copies one bus to another: topics, records, positions of consumer groups. So an embedded broker grows into Kafka.

Records keep their offsets. Services remember offsets in places that no copy of the bus can reach (their databases, the
trainer's checkpoints, dead letters), and all of them stay right. Therefore

- a log that no longer begins at 0 is given as many padding records, which are deleted again before the first real one;
- an offset in the middle that holds no record (the end of a transaction) holds a repetition of the record before it,
  which consumers dedupe by id as they do after a producer's retry;
- how far a copy has come is where the target's log ends, and nothing else has to be remembered to continue it.

A compacted topic is a table: its newest rows are copied, and positions in it are translated.
"""

from headrace_operations.mirror.run import Mirrored, mirror

__all__ = ["Mirrored", "mirror"]
