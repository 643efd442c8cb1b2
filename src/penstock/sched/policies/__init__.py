"""The scheduler's seven seams and what ships for them."""
