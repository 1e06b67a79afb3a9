"""From the command line to a checked plan of a run: the Hydra application and its helpers."""
