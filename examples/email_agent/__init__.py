"""An agent that answers questions about a mailbox, and is trained on its own traffic when Headrace serves its model."""
