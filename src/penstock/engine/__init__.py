"""The step without a loop (`core`), the loop around it (`loop`), and the ports that they need."""
