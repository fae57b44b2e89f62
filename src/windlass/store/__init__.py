"""Where the truth is: the ports and their adapters."""
