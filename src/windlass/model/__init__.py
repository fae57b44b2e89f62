"""What things are: frozen values and the errors we raise."""
