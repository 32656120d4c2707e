"""Agent that answers questions about a mailbox; it is trained on its own traffic if Headrace serves its model."""
