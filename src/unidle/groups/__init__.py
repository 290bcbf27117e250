"""Groups: several runs that are trained together in one process."""
