"""What `unidle watch` puts inside every Python that the watched command starts.

This folder goes on PYTHONPATH, so that its `sitecustomize` is loaded there. The command may run on another Python, with
other packages and without unidle: these modules use nothing but the standard library, of Python 3.8 and later.
"""
