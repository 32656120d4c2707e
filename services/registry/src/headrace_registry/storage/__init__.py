"""Tables of the registry, and their reading and writing."""
