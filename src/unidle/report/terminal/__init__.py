"""Terminal output of all commands."""
