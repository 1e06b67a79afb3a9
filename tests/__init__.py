"""Tests, in folders that mirror the packages. A package, so that worker processes can import it."""
