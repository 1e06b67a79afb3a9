"""The schemes, one mechanism a file."""
