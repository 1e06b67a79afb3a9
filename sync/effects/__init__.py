"""Wrappers around any channel: wire formats and slow links."""
