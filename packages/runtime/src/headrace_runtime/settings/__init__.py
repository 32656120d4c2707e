"""Settings of a service: their sections, the table that they are read from, and their description."""
