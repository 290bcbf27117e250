"""Presents runs to people: terminal output, report page and dashboard."""
