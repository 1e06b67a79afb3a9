"""Analysis of runs: statistics, figures and reports."""
