"""Requests whose next tokens are chosen by other means than the executor's sample."""
