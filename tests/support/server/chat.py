"""Helpers that `server/test_chat.py` shares with other tests."""

HI_PROMPT = "<|turn|>user: hi<|end|>\n<|turn|>assistant: "
