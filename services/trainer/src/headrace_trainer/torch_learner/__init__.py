"""The back end `torch`: weights and optimizer in this process, on one device."""
