"""unidle/Trading-v0: a portfolio over many instruments."""
