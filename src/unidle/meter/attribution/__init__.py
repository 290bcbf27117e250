"""Attributes a run's time to phases, and GPU idle time to causes."""
