"""An agent that answers questions over a mailbox, and learns from doing so when Headrace serves its model."""
