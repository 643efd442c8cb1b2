"""What tells one model's files from another's without reading all of them: names, sizes, times and samples. Called by `build`
for what means something with the same weights only: what is kept on disk, and the fingerprint that answers tell.
"""

from __future__ import annotations

from hashlib import blake2b
from pathlib import Path

NUM_SAMPLES = 16
SAMPLE_BYTES = 1 << 16


def fingerprint(path: Path, *, has_times: bool = True) -> bytes:
    """32 bytes of a file, or of the files directly in a folder. Raises OSError if they can't be read.

    `has_times`: with the times of their last change, which tell a change that no sample hits, and differ between copies.
    """
    digest = blake2b(digest_size=32)
    files = sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]
    for file in files:
        status = file.stat()
        digest.update(f"{file.name}\0{status.st_size}\0{status.st_mtime_ns if has_times else ''}\0".encode())
        with file.open("rb") as data:
            for idx in range(NUM_SAMPLES):
                data.seek(status.st_size * idx // NUM_SAMPLES)
                digest.update(data.read(SAMPLE_BYTES))
    return digest.digest()
