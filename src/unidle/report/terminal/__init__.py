"""What is shown on a terminal."""
