"""A job of 2,000 rows that is killed ten times ends with the bytes of an undisturbed one."""
