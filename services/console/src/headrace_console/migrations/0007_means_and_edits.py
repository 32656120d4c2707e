"""The sum of the values in each row of `hours`, the valid edits of each session, and an index for single turns.

Sums are computed from the stored rewards. A row that counts others, too, because their sessions have expired, gets no
sum. Feedback is read again, so that the edits before this migration are known.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_SUMS = """
UPDATE hours SET total = sums.total
FROM (
  SELECT h.tenant, h.source, h.hour, h.outcome, h.bucket, sum(r.value) AS total, count(*) AS rewards
  FROM rewards AS r
  JOIN trajectories AS t ON t.id = r.trajectory
  JOIN sessions AS s ON s.id = t.session
  JOIN hours AS h ON h.tenant = s.tenant AND h.source = r.source AND h.hour = r.at_ms / 3600000
    AND h.outcome = r.outcome
    AND (h.bucket = 10 OR r.value * 10 < h.bucket + 1) AND (h.bucket = -11 OR r.value * 10 >= h.bucket)
  WHERE r.value IS NOT NULL
  GROUP BY h.tenant, h.source, h.hour, h.outcome, h.bucket
) AS sums
WHERE hours.tenant = sums.tenant AND hours.source = sums.source AND hours.hour = sums.hour
  AND hours.outcome = sums.outcome AND hours.bucket = sums.bucket AND hours.rewards = sums.rewards
"""


def upgrade() -> None:
    op.add_column("hours", sa.Column("total", sa.Float))
    op.execute(_SUMS)
    op.add_column("sessions", sa.Column("edits", sa.Text))
    op.execute("DELETE FROM positions WHERE topic = 'feedback'")
    op.drop_index("ix_turns_session", "turns")
    op.create_index("ix_turns_session", "turns", ["session", sa.text("substr(name, 1, 7)")])
