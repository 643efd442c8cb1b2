"""Routes: which of two models answers a question, the small or the large one."""

MAX_QUESTION_CHARS = 16_384
"""Characters of a question that count, the first ones: more than an encoder reads."""
