"""The board, alerts and runbooks that `penstock monitoring render` writes."""
