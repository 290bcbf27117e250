"""unidle/Mission-v0: search and rescue with many units."""
