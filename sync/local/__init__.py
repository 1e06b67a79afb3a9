"""What processes of one machine share: memory, doorbells, connections, and news of their ends."""
