"""The scheduler's seven seams and what ships for them. A policy is a small value chosen by name, not a subclass of the
scheduler."""
