"""The frameworks' own classes that limit staleness, in virtual time. See docs/max-staleness.md."""
