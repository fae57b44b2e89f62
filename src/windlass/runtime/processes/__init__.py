"""Handlers in processes of their own: a pool of them beside the worker, and what they do."""
