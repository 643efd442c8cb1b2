"""The step without a loop (`core`), the thread around it (`thread`), and the ports that they need."""
