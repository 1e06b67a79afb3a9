"""Networks: encoders of observations, heads for actions, and running statistics."""
