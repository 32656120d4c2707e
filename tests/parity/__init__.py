"""Programs that use every item of the seed documents, on a tiny model in private stacks: `make check NAME=parity`."""
