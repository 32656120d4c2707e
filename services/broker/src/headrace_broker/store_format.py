"""Tables of the broker's file, and the row ids of batches.

A batch's row id is `position(partition, base offset)`, so the table itself is the index: the batches of a partition are
stored contiguously in the order of their offsets, and retention frees contiguous pages.
"""

from __future__ import annotations

FORMAT = 2
_OFFSET_BITS = 44
OFFSET_MAX = (1 << _OFFSET_BITS) - 1
PARTITION_ID_MAX = (1 << (63 - _OFFSET_BITS)) - 1

TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value ANY) WITHOUT ROWID;
INSERT INTO meta VALUES ('cluster_id', lower(hex(randomblob(16)))), ('next_producer_id', 1000);
CREATE TABLE topics (name TEXT PRIMARY KEY, config TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE partitions (
  id INTEGER PRIMARY KEY AUTOINCREMENT, topic TEXT NOT NULL, number INTEGER NOT NULL,
  log_start INTEGER NOT NULL DEFAULT 0, log_end INTEGER NOT NULL DEFAULT 0, bytes INTEGER NOT NULL DEFAULT 0,
  max_timestamp INTEGER NOT NULL DEFAULT -1, cleaned_to INTEGER NOT NULL DEFAULT 0,
  clean_bytes INTEGER NOT NULL DEFAULT 0, UNIQUE (topic, number)
);
CREATE TABLE batches (
  position INTEGER PRIMARY KEY, last_offset INTEGER NOT NULL, max_timestamp INTEGER NOT NULL,
  reached_timestamp INTEGER NOT NULL, payload BLOB NOT NULL
);
CREATE TABLE producers (
  partition INTEGER NOT NULL, producer_id INTEGER NOT NULL, epoch INTEGER NOT NULL, recent BLOB NOT NULL,
  open_from INTEGER, seen_ms INTEGER NOT NULL, PRIMARY KEY (partition, producer_id)
) WITHOUT ROWID;
CREATE TABLE aborted (
  partition INTEGER NOT NULL, last_offset INTEGER NOT NULL, first_offset INTEGER NOT NULL, producer_id INTEGER NOT NULL,
  PRIMARY KEY (partition, last_offset)
) WITHOUT ROWID;
CREATE TABLE transactions (
  id TEXT PRIMARY KEY, producer_id INTEGER NOT NULL, epoch INTEGER NOT NULL, timeout_ms INTEGER NOT NULL,
  started_ms INTEGER, seen_ms INTEGER NOT NULL, partitions TEXT NOT NULL, bumped_from INTEGER
) WITHOUT ROWID;
CREATE TABLE offsets (
  group_id TEXT NOT NULL, topic TEXT NOT NULL, partition INTEGER NOT NULL, committed INTEGER NOT NULL, metadata TEXT,
  PRIMARY KEY (group_id, topic, partition)
) WITHOUT ROWID;
CREATE TABLE pending_offsets (
  transaction_id TEXT NOT NULL, group_id TEXT NOT NULL, topic TEXT NOT NULL, partition INTEGER NOT NULL,
  committed INTEGER NOT NULL, metadata TEXT, PRIMARY KEY (transaction_id, group_id, topic, partition)
) WITHOUT ROWID;
CREATE TABLE groups (id TEXT PRIMARY KEY, state BLOB NOT NULL, used_ms INTEGER NOT NULL) WITHOUT ROWID;
"""


FROM_1 = "ALTER TABLE transactions ADD COLUMN bumped_from INTEGER;"


TABLE_NAMES = (
    "meta",
    "topics",
    "partitions",
    "batches",
    "producers",
    "aborted",
    "transactions",
    "offsets",
    "pending_offsets",
    "groups",
)


def position(partition_id: int, offset: int) -> int:
    """Return the row id of a batch: the partition id and the base offset in one number. Offsets have 44 bits, enough
    for five years of 100,000 records per second."""
    return partition_id << _OFFSET_BITS | offset


def partition_of(row_id: int) -> int:
    """Return the partition id that the row id of a batch contains."""
    return row_id >> _OFFSET_BITS


def offset_of(row_id: int) -> int:
    """Return the base offset that the row id of a batch contains."""
    return row_id & OFFSET_MAX
