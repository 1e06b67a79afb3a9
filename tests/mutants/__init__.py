"""Small changes to the code, each with the tests that must fail after it: `make mutants`."""
