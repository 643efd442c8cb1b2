"""The orders that ship, a file each; `orders.py` has their names."""
