"""`penstock index`: an index of a folder's documents, for pipelines."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from penstock.types.errors import ConfigError, counted

if TYPE_CHECKING:  # imports NumPy
    from penstock.search.index import F32


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("-o", "--output", type=click.Path(dir_okay=False, path_type=Path), help="Default: FOLDER.index, here.")
@click.option("--embedder", default="minilm", show_default=True, metavar="MODEL", help="Embedding model.")
def index(folder: Path, output: Path | None, embedder: str) -> None:
    """Index the documents in FOLDER (.txt, .md, .rst, .html, .pdf) for a pipeline.

    A second run reads only changed files, and removes deleted ones. Servers that read the index see the changes at once.
    """
    import numpy as np

    from penstock.llm import LLM
    from penstock.search.index import PROBE, Reader, create, update
    from penstock.serve.texts.read import DOCUMENT_PROMPTS, first_prompt

    path = output or Path(f"{folder.resolve().name}.index")
    with LLM(embedder) as llm:
        [probed] = llm.embed([PROBE])  # before a file is made
        probe = np.array(probed.outputs.embedding, np.float32)
        is_new = not path.exists()
        create(path, folder, embedder, probe)
        prompt_name = first_prompt(llm.prompts, DOCUMENT_PROMPTS)

        def embed(texts: Sequence[str]) -> F32:
            found = llm.embed(list(texts), prompt_name=prompt_name)
            return np.array([one.outputs.embedding for one in found], np.float32)

        def fit(texts: Sequence[str]) -> list[bool]:
            return [num <= llm.max_model_len for num in llm.num_tokens(texts, prompt_name=prompt_name)]

        for changes in update(path, folder, embed, fit):
            print(f"\r{counted(changes.num_new, 'file')} read", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    for name, why in changes.unreadable.items():
        print(f"{name or folder} is left out: {why}", file=sys.stderr)
    reader = Reader(path)
    reader.close()
    if not reader.num_passages:
        if is_new:
            path.unlink()
        raise ConfigError(f"No text was found in {folder}.", remedy="Name a folder with .txt, .md, .rst, .html or .pdf files.")
    print(
        f"{path}: {counted(changes.num_new, 'file')} new or changed, {changes.num_same} as they were, {changes.num_gone} gone; "
        f"{reader.num_passages:,} passages."
    )
