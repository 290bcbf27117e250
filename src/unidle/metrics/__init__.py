"""Where metrics are written."""
