"""The seven seams of the scheduler and what ships for them. A policy is a small value, chosen by name, never a subclass of the
scheduler.
"""
