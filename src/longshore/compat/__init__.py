"""Other people's names, for scripts that nobody wants to change."""
