"""Admission: which calls may come in. Decides over integers: no clock, no randomness, no I/O."""
