"""What a run tells people: live progress, closing summary, report page."""
