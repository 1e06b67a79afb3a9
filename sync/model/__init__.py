"""A model as one flat block of memory: its layout, one version in it, and the way back."""
