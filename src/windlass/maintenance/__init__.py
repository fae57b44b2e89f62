"""What only the leader does."""
