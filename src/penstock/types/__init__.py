"""The shared vocabulary: plain data, imported by every package and importing none."""
