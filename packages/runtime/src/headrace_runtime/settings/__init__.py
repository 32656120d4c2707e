"""Settings of the services: their sections, the file and environment variables that they are read from, and their
description."""
