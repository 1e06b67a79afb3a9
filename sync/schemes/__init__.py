"""The schemes, one mechanism per file."""
