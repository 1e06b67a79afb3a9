"""What the collectors do: whether their data is true, what they take, and how they fail."""
