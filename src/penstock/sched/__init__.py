"""What runs in the next step. Decides over integers and requests: no clock, no randomness, no I/O."""
