"""Files that a running server watches."""

from pathlib import Path


def put(path: Path, text: str) -> None:
    """Write the file in one step. `write_text` empties it first, and a server that looks every 20 ms may read it then."""
    new = path.with_name(path.name + ".new")
    new.write_text(text)
    new.replace(path)
