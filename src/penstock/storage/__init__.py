"""Storage of KV blocks outside the pool."""
