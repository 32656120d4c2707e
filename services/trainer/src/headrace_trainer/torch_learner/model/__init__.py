"""The model that is trained: loaded, packed, with attention, norms and an output head that a step has memory for."""
