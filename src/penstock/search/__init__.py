"""Search: an index of documents on disk, and the passages that are nearest to a question."""
