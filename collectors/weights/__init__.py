"""Moving weights from the trainer's policy to the policies of workers."""
