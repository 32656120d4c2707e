"""What others add to Headrace without changing it."""
