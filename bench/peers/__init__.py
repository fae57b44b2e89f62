"""One adapter for each queue, all with the same command line: see `adapter.py`."""
