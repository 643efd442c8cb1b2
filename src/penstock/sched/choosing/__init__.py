"""Who chooses the next token of a row, where the executor's sample is not the answer: `chooser.py` is the seam."""
