"""What should happen next: pure functions of values and `now`."""
