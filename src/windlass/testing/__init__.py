"""For users' own test suites."""
