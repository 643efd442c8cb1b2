"""Running models made of a config: devices, executors, memory, policies, and the factory that puts them together."""
