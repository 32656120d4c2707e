"""What is recorded of a call: transcript, turn, and the spool of events that the bus has not taken."""
