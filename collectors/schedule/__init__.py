"""Schedules: whose batch comes next and which version acts at which step, recorded or simulated."""
