"""What is made of the runs: statistics."""
