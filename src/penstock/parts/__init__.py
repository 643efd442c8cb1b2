"""Parts of a running model, each made of a config. Called by the composition root, which puts them together."""
