"""Weight synchronisation beyond one machine: one engine and one scheme for each way there."""
