"""The learning algorithms, each in one file to be read from top to bottom."""
