"""The choice of a row's next token, where the executor's sample is not the answer. `chooser.py` is the seam."""
