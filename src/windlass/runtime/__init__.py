"""The one-way street from claimed task to settled outcome."""
