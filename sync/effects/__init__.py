"""What happens to versions before they travel: lag, tearing and wire formats; and slow links."""
