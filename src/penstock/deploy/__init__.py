"""Turns a config into running models. `factory` combines the other files: devices, executors, memory, policies."""
