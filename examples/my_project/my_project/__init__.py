"""Parts for Lockstep; `my_project.parts` registers them."""
