"""`unidle tune`: engine settings tried one at a time."""
