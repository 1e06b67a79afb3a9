"""Building blocks for one machine: shared memory, doorbells, connections, process monitoring."""
