"""The version of unidle."""

__version__ = "0.2.0"
