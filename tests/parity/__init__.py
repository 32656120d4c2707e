"""Programs that use every item of the seeds' documents, on a tiny model in temporary stacks: `make parity`."""
