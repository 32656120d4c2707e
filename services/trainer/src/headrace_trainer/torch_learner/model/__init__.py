"""The model in training: loading, packing, attention, norms, and an output head with bounded memory."""
