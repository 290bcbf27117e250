"""Modules that `unidle watch` loads into every Python process of the watched command.

This folder goes on PYTHONPATH, so that Python loads its `sitecustomize`. The command may use another Python, with other
packages and without unidle, so these modules need only the standard library of Python 3.8 or later.
"""
