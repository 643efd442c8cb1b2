"""Routes: which of two models answers a question, the small or the large one."""
