"""Read model of the console: rows with numbers and offsets of everything on the topics, and exact counts."""
