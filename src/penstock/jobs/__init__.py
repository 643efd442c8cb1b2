"""Jobs: many requests that nobody waits for, and the order in which they run."""
