"""`unidle watch`: the same for any command, from outside."""
