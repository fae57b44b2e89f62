"""Exceptions as values: what they say of themselves, what class they are of, what is kept of them."""
