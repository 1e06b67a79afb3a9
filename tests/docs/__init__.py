"""What the pages say holds: commands, links, metrics and words."""
