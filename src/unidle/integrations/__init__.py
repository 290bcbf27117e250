"""The meter inside other libraries' training loops."""
