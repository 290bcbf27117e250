"""`unidle watch`: runs any command and finds out what it spends its time on, without changing it."""
