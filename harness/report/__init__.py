"""A report on any set of run directories: `python -m harness.report <sweep or run dirs...>`."""
