from penstock.llm import *  # noqa: F403

__version__: str
