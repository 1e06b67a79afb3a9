"""The plugin module: importing it registers every part of this project.

Name it by `plugins=[my_project.parts]` on the command line, by `LOCKSTEP_PLUGINS=my_project.parts`
in the environment, or by the entry point that pyproject.toml shows.
"""

from my_project import callback, model, reinforce, scheme, wrappers

__all__ = ["callback", "model", "reinforce", "scheme", "wrappers"]
