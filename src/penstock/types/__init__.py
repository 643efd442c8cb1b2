"""The shared vocabulary: plain data, no behaviour, no imports from the rest of the package."""
