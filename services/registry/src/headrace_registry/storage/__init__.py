"""Tables of the registry, and functions that read and write them."""
