"""Wire formats and slow links."""
