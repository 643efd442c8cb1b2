"""Models of the Hugging Face hub, with a pretended library; and what is said without it."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import shutil
import sys
import threading
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.models.catalog import COMPLETE_MARKER, resolve, unfinished_marker
from penstock.models.hf import load_hf_directory, open_weights
from penstock.models.hub import FILES
from penstock.models.load import load_model
from penstock.models.progress import Progress
from penstock.models.pull import ensure_present, pull
from penstock.types.errors import DownloadError, ModelError
from support.parity.encoder_cases import ENCODERS, write_encoder
from support.tiny_models import TinyLlama, write_gguf, write_hf

SHA = "1" * 40


def listed(hub: Path) -> SimpleNamespace:
    """The hub's list of a repository: its revision, and the size and hashes of each file."""
    siblings = []
    for path in sorted(path for path in hub.rglob("*") if path.is_file()):
        data = path.read_bytes()
        blob_id = hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
        lfs = SimpleNamespace(sha256=hashlib.sha256(data).hexdigest()) if path.suffix == ".safetensors" else None
        name = path.relative_to(hub).as_posix()
        siblings.append(SimpleNamespace(rfilename=name, size=len(data), blob_id=blob_id, lfs=lfs))
    told = repr([(file.rfilename, file.blob_id) for file in siblings])
    return SimpleNamespace(sha=hashlib.sha1(told.encode(), usedforsecurity=False).hexdigest(), siblings=siblings)


def install(monkeypatch, *, names=("config.json", "model.safetensors", "tokenizer.json"), **functions) -> None:
    """Pretend to have the library, with the hub's list of a repository's files."""
    info = SimpleNamespace(sha=SHA, siblings=[SimpleNamespace(rfilename=name, size=None) for name in names])
    known = {
        "model_info": lambda _repo, *, files_metadata: info,
        "hf_hub_url": lambda repo, name, *, revision: f"{repo}/{name}",
        "hf_hub_download": lambda *_args, **_named: None,
        "get_hf_file_metadata": lambda _url: None,
        **functions,
    }
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(**known))


def test_whole_repository(tmp_path, monkeypatch):
    def snapshot_download(repo: str, *, local_dir: Path, revision: str, allow_patterns: list[str]) -> None:
        assert repo == "org/repo"
        assert "*.safetensors" not in allow_patterns
        assert "quantize_config.json" in allow_patterns  # without it a checkpoint of AutoGPTQ is no known model
        write_hf(local_dir, TinyLlama())

    install(monkeypatch, snapshot_download=snapshot_download)
    source = resolve("hf:org/repo", tmp_path)
    assert ensure_present(source).is_present
    assert load_model(source).name == "org/repo"


def serve(monkeypatch, hub: Path) -> None:
    """Let the library fetch from a folder, as it does: patterns match whole paths, and each file gets a record."""

    def fetch(repo: str, name: str, *, local_dir: Path, revision: str) -> None:
        record = local_dir / ".cache/huggingface/download" / f"{name}.metadata"
        for path in (record, local_dir / name):
            path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(hub / name, local_dir / name)
        record.write_text(revision)

    def snapshot_download(repo: str, *, local_dir: Path, revision: str, allow_patterns: list[str]) -> None:
        for file in (path.relative_to(hub).as_posix() for path in hub.rglob("*") if path.is_file()):
            if any(fnmatch(file, pattern) for pattern in allow_patterns):
                fetch(repo, file, local_dir=local_dir, revision=revision)

    functions = {"snapshot_download": snapshot_download, "hf_hub_download": fetch}
    install(monkeypatch, model_info=lambda _repo, *, files_metadata: listed(hub), **functions)


class Stages(Progress):
    def __init__(self) -> None:
        self.sizes: list[int] = []

    def begin(self, label: str, total_bytes: int) -> None:
        self.sizes.append(total_bytes)


@pytest.fixture
def sharded(tmp_path) -> Path:
    """A repository whose shards are named as Qwen 3.5's are."""
    hub = write_hf(tmp_path / "upstream", TinyLlama(), num_shards=2)
    index = hub / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("model-", "model.safetensors-"))
    for shard in hub.glob("model-*"):
        shard.rename(shard.with_name(shard.name.replace("model-", "model.safetensors-")))
    return hub


def test_all_shards_of_the_index_are_fetched(tmp_path, monkeypatch, sharded):
    serve(monkeypatch, sharded)
    (sharded / "model.fp16.safetensors").touch()
    source = ensure_present(resolve("hf:org/repo", tmp_path))
    assert load_model(source).name == "org/repo"
    assert not (source.path / "model.fp16.safetensors").exists()


def test_pull_updates_what_is_present(tmp_path, monkeypatch, sharded):
    serve(monkeypatch, sharded)
    source = pull("hf:org/repo", tmp_path)
    shards = sorted(source.path.glob("*.safetensors"))
    shards[0].unlink()
    shards[1].write_bytes(b"damaged")
    (sharded / "chat_template.jinja").write_text("corrected")
    ensure_present(source)
    assert not shards[0].exists(), "to serve a model that is present asks no hub"
    assert pull("hf:org/repo", tmp_path) == source
    assert load_model(source).chat_templates["default"] == "corrected"


@pytest.mark.parametrize("num_shards", [(1, 2), (2, 1)])
def test_an_update_forgets_weights_of_an_older_form(tmp_path, monkeypatch, num_shards):
    for number, num_layers in zip(num_shards, (2, 1), strict=True):
        hub = write_hf(tmp_path / f"upstream-{number}", TinyLlama(num_layers=num_layers), num_shards=number)
        serve(monkeypatch, hub)
        source = pull("hf:org/repo", tmp_path)
    assert open_weights(source.path).keys() == open_weights(hub).keys()
    assert load_model(source).name == "org/repo"


def test_an_update_deletes_files_that_the_repository_no_longer_has(tmp_path, monkeypatch, sharded):
    """But neither a file of the user's own nor a GGUF file, which is another model."""
    dropped = ("tokenizer_config.json", "1_Pooling/config.json", next(sharded.glob("model.safetensors-*")).name)
    for name in ("m.gguf", *dropped[:2]):
        (sharded / name).parent.mkdir(exist_ok=True)
        (sharded / name).write_text("{}")
    serve(monkeypatch, sharded)
    pull("hf:org/repo:m.gguf", tmp_path)
    source = pull("hf:org/repo", tmp_path)
    assert all((source.path / name).is_file() for name in dropped)
    (source.path / "added_tokens.json").write_text("{}")
    write_hf(sharded, TinyLlama())
    for name in ("m.gguf", "model.safetensors.index.json", *dropped):
        (sharded / name).unlink()
    pull("hf:org/repo", tmp_path)
    assert not [name for name in dropped if list(source.path.rglob(f"{name}*"))]
    assert (source.path / "added_tokens.json").is_file()
    assert (source.path / "m.gguf").is_file()


def test_pull_without_a_network_keeps_what_is_present(tmp_path, monkeypatch, sharded):
    serve(monkeypatch, sharded)
    (sharded / "m.gguf").touch()
    for name in ("hf:org/repo", "hf:org/repo:m.gguf"):
        pull(name, tmp_path)
    functions = vars(sys.modules["huggingface_hub"])

    def model_info(repo: str, *, files_metadata: bool) -> None:
        raise RuntimeError("Name or service not known")

    install(monkeypatch, **functions | {"model_info": model_info})
    for name in ("hf:org/repo", "hf:org/repo:m.gguf"):
        source = resolve(name, tmp_path)
        with pytest.raises(DownloadError, match=f"Name or service not known. {source.path} stays as it is"):
            pull(name, tmp_path)
        assert source.is_present


def test_an_update_that_the_hub_refuses_keeps_the_complete_model(tmp_path, monkeypatch, sharded):
    serve(monkeypatch, sharded)
    source = pull("hf:org/repo", tmp_path)
    (sharded / "chat_template.jinja").write_text("corrected")

    def get_hf_file_metadata(url: str) -> None:
        raise RuntimeError(f"403 Client Error: {url} is gated")

    install(monkeypatch, **vars(sys.modules["huggingface_hub"]) | {"get_hf_file_metadata": get_hf_file_metadata})
    with pytest.raises(DownloadError, match=f"org/repo/config.json is gated. {source.path} stays as it is. .*set HF_TOKEN"):
        pull("hf:org/repo", tmp_path)
    assert source.is_present


def test_a_model_of_the_hub_s_revision_is_neither_fetched_nor_read(tmp_path, monkeypatch, sharded):
    """Its sizes tell whether it is whole."""
    serve(monkeypatch, sharded)
    source = pull("hf:org/repo", tmp_path)
    functions = vars(sys.modules["huggingface_hub"])
    asked = []

    def get_hf_file_metadata(url: str) -> None:
        asked.append(url)

    install(monkeypatch, **functions | {"get_hf_file_metadata": get_hf_file_metadata})
    pull("hf:org/repo", tmp_path)
    assert (asked, source.is_present) == ([], True)
    next(source.path.glob("*.safetensors")).write_bytes(b"cut off")
    pull("hf:org/repo", tmp_path)
    assert asked == ["org/repo/config.json"]
    assert load_model(source).name == "org/repo"


def test_a_push_during_a_pull_does_not_mix_revisions(tmp_path, monkeypatch, sharded):
    serve(monkeypatch, sharded)
    known, revisions = vars(sys.modules["huggingface_hub"]), []

    def noting(name):
        def fetch(*args, **named):
            revisions.append(named["revision"])
            (sharded / "README.md").write_text("pushed")
            return known[name](*args, **named)

        return fetch

    sha = listed(sharded).sha
    install(monkeypatch, **known | {name: noting(name) for name in ("hf_hub_url", "snapshot_download", "hf_hub_download")})
    pull("hf:org/repo", tmp_path)
    assert len(revisions) == 4
    assert set(revisions) == {sha}


@pytest.mark.parametrize("file", ["model.safetensors", "m.gguf"])
def test_a_file_that_the_library_leaves_as_it_was_is_fetched(tmp_path, monkeypatch, file):
    """The library takes a file on disk for the newest if the hub answers 429 or 403."""
    hub = write_hf(tmp_path / "upstream", TinyLlama())
    if file == "m.gguf":
        write_gguf(hub / file, TinyLlama())
    serve(monkeypatch, hub)
    model = "hf:org/repo:m.gguf" if file == "m.gguf" else "hf:org/repo"
    stages = Stages()
    source = pull(model, tmp_path, progress=stages)
    assert stages.sizes == [], "what was just fetched is not read again"
    data = (hub / file).read_bytes()[:-1] + b"!"
    (hub / file).write_bytes(data)
    is_limited, forced = True, []

    def hf_hub_download(repo: str, name: str, *, local_dir: Path, revision: str, force_download: bool = False) -> None:
        if not force_download:
            return
        forced.append(name)
        if is_limited:
            raise ValueError("Force download failed due to the above error.") from RuntimeError("429 Too Many Requests")
        shutil.copy(hub / name, local_dir / name)

    left = {"snapshot_download": lambda *_args, **_named: None, "hf_hub_download": hf_hub_download}
    install(monkeypatch, **vars(sys.modules["huggingface_hub"]) | left)
    with pytest.raises(DownloadError, match="429 Too Many Requests"):
        pull(model, tmp_path, progress=stages)
    assert stages.sizes[0] >= len(data)
    is_limited = False
    pull(model, tmp_path)
    assert (forced, source.is_present) == ([file] * 2, True)
    assert (tmp_path / "hub/org/repo" / file).read_bytes() == data


def test_an_update_that_is_interrupted_does_not_count(tmp_path, monkeypatch, sharded):
    serve(monkeypatch, sharded)
    source = pull("hf:org/repo", tmp_path)
    (sharded / "generation_config.json").write_text("{}")
    next(sharded.glob("*.safetensors")).unlink()
    with pytest.raises(DownloadError):
        pull("hf:org/repo", tmp_path)
    assert not source.is_present, "its files may be of two revisions"


def test_a_snapshot_without_a_shard_does_not_count(tmp_path, monkeypatch, sharded):
    serve(monkeypatch, sharded)
    next(sharded.glob("*.safetensors")).unlink()
    source = resolve("hf:org/repo", tmp_path)
    with pytest.raises(DownloadError, match="No such file"):
        ensure_present(source)
    assert not source.is_present


def test_a_hubs_index_must_not_lead_out_of_the_directory(tmp_path, monkeypatch, sharded):
    serve(monkeypatch, sharded)
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm": "../norm"}}))
    with pytest.raises(ModelError, match="weight_map names the file"):
        ensure_present(resolve("hf:org/repo", tmp_path))


def test_every_file_that_the_loader_looks_for_is_fetched(tmp_path, monkeypatch):
    text = write_hf(tmp_path / "text", TinyLlama())
    (text / "tokenizer.json").rename(text / "tokenizer.model")
    (text / "chat_template.jinja").unlink()
    dense, late = (write_encoder(ENCODERS[name], tmp_path / name) for name in ("bert_dense", "bert"))
    (late / "modules.json").unlink()
    config = json.loads((late / "config.json").read_text())
    (late / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))
    looked_for: set[Path] = set()

    def record(method):
        return lambda path, *args, **named: looked_for.add(path) or method(path, *args, **named)

    for name in ("is_file", "open", "read_bytes"):
        monkeypatch.setattr(Path, name, record(getattr(Path, name)))
    load_hf_directory(text)
    load_hf_directory(dense)
    with pytest.raises(ModelError, match=r"artifact\.metadata: there is no such file"):
        load_hf_directory(late)
    names = {"/".join(path.relative_to(tmp_path).parts[1:]) for path in looked_for if path.is_relative_to(tmp_path)}
    assert {"config.json", "tekken.json", "chat_template.json", "artifact.metadata", "2_Dense/model.safetensors"} < names
    assert not [name for name in names if not any(fnmatch(name, pattern) for pattern in FILES)]


def test_an_adapter_comes_with_its_weights(tmp_path, monkeypatch):
    hub = tmp_path / "upstream"
    hub.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"):
        (hub / name).touch()
    serve(monkeypatch, hub)
    path = ensure_present(resolve("hf:org/lora", tmp_path)).path
    assert {file.name for file in path.glob("adapter*")} == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize("file", ["m.gguf", "deep/er/m.gguf"])
def test_one_file(tmp_path, monkeypatch, file):
    def hf_hub_download(repo: str, name: str, *, local_dir: Path, revision: str) -> None:
        (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
        write_gguf(local_dir / name, TinyLlama())

    install(monkeypatch, hf_hub_download=hf_hub_download)
    source = resolve(f"hf:org/repo:{file}", tmp_path)
    assert ensure_present(source).path == tmp_path / "hub/org/repo" / file
    assert load_model(source).name == "m"


def test_a_split_file_comes_with_its_other_files(tmp_path, monkeypatch):
    fetched: list[str] = []

    def hf_hub_download(repo: str, name: str, *, local_dir: Path, revision: str) -> None:
        if len(fetched) == 1 and name not in fetched and not is_online:
            raise OSError("Why")
        fetched.append(name)
        (local_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (local_dir / name).touch()

    install(monkeypatch, hf_hub_download=hf_hub_download)
    source, is_online = resolve("hf:org/repo:q4/m-00001-of-00003.gguf", tmp_path), False
    with pytest.raises(DownloadError):
        ensure_present(source)
    assert not source.is_present, "one file of three"
    is_online = True
    assert ensure_present(source).is_present
    assert sorted(set(fetched)) == [f"q4/m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


def test_the_files_of_a_split_model_are_of_one_revision(tmp_path, monkeypatch):
    hub = tmp_path / "upstream"
    hub.mkdir()
    names = [f"m-0000{number}-of-00002.gguf" for number in (1, 2)]

    def interrupted(repo: str, name: str, **named) -> None:
        if name == names[1]:
            raise RuntimeError("Name or service not known")
        fetch(repo, name, **named)

    serve(monkeypatch, hub)
    known = vars(sys.modules["huggingface_hub"])
    fetch, model = known["hf_hub_download"], f"hf:org/repo:{names[0]}"
    source = resolve(model, tmp_path)
    for content, ends in (("first", False), ("second", True), ("third", True), ("fourth", False), ("fifth", True)):
        for name in names:
            (hub / name).write_text(content)
        install(monkeypatch, **known if ends else known | {"hf_hub_download": interrupted})
        if ends:
            pull(model, tmp_path)
            assert [(source.path.parent / name).read_text() for name in names] == [content] * 2
        else:
            with pytest.raises(DownloadError, match=r"not known\. Check"):
                pull(model, tmp_path)
        assert source.is_present == ends


def test_a_split_model_can_be_used_while_a_pull_compares_it(tmp_path, monkeypatch):
    class Uses(Progress):
        def update(self, done_bytes: int) -> None:
            assert source.is_present

    hub = tmp_path / "upstream"
    hub.mkdir()
    for number in (1, 2):
        (hub / f"m-0000{number}-of-00002.gguf").write_text("same")
    serve(monkeypatch, hub)
    source = pull("hf:org/repo:m-00001-of-00002.gguf", tmp_path)
    install(monkeypatch, **vars(sys.modules["huggingface_hub"]) | {"hf_hub_download": pytest.fail})  # nothing is fetched
    pull("hf:org/repo:m-00001-of-00002.gguf", tmp_path, progress=Uses())
    unfinished_marker(source.path).touch()
    assert ensure_present(source).is_present, "a pull that was interrupted after its last file"


@pytest.mark.parametrize("file", ["", ":m.gguf"])
def test_a_pull_deletes_what_killed_ones_left(tmp_path, monkeypatch, sharded, file):
    (sharded / "m.gguf").touch()
    serve(monkeypatch, sharded)
    records = tmp_path / "hub/org/repo/.cache/huggingface/download"
    (records / "deep").mkdir(parents=True)
    for name in ("hash.etag.1234abcd.incomplete", "deep/hash.etag.1234abcd.incomplete", "hash.etag.incomplete"):
        (records / name).touch()
    pull(f"hf:org/repo{file}", tmp_path)
    left = [path.name for path in records.rglob("*.incomplete")]
    assert left == ["hash.etag.incomplete"], "a part that the library's older versions resume"


def test_a_second_pull_waits_for_the_first_and_leaves_its_files(tmp_path, monkeypatch, sharded):
    class Notes(Progress):
        def note(self, text: str) -> None:
            if "Another process" in text:
                assert threading.current_thread() is second, "what is the hub's newest waits for nobody"
                noted.set()

    serve(monkeypatch, sharded)
    noted, asked = threading.Event(), []
    source = pull("hf:org/repo", tmp_path)
    install(monkeypatch, **vars(sys.modules["huggingface_hub"]) | {"get_hf_file_metadata": asked.append})
    part = source.path / ".cache/huggingface/download/hash.etag.1234abcd.incomplete"
    part.touch()
    marker = source.path / COMPLETE_MARKER
    revision = marker.read_text()
    marker.unlink()
    second = threading.Thread(target=ensure_present, args=(source,), kwargs={"progress": Notes()})
    with (tmp_path / "hub/org/.repo.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second.start()
        assert noted.wait(60)
        assert part.exists(), "the first writes it"
        marker.write_text(revision)
        pull("hf:org/repo", tmp_path, progress=Notes())
    second.join(60)
    assert (second.is_alive(), source.is_present, asked) == (False, True, [])


def test_interrupted_snapshot_does_not_count(tmp_path, monkeypatch):
    def snapshot_download(repo: str, *, local_dir: Path, revision: str, allow_patterns: list[str]) -> None:
        write_hf(local_dir, TinyLlama())
        raise KeyboardInterrupt

    install(monkeypatch, snapshot_download=snapshot_download)
    source = resolve("hf:org/repo", tmp_path)
    with pytest.raises(KeyboardInterrupt):
        ensure_present(source)
    assert not source.is_present


def test_a_partial_folder_does_not_count_while_the_hub_can_not_be_reached(tmp_path, monkeypatch):
    def model_info(repo: str, *, files_metadata: bool) -> None:
        raise RuntimeError("Name or service not known")

    install(monkeypatch, model_info=model_info, snapshot_download=lambda *_args, **_named: None)
    source = resolve("hf:org/repo", tmp_path)
    write_hf(source.path, TinyLlama())
    (source.path / "tokenizer.json").unlink()
    with pytest.raises(DownloadError, match=r"org/repo could not be fetched.*Name or service not known"):
        ensure_present(source)
    assert not source.is_present


def test_a_folder_without_a_listed_file_does_not_count(tmp_path, monkeypatch):
    """The library returns it if the hub answers with an error while it looks for the files."""
    source = resolve("hf:org/repo", tmp_path)
    info = listed(write_hf(source.path, TinyLlama()))
    fetching = {"snapshot_download": lambda *_args, **_named: None}
    install(monkeypatch, model_info=lambda _repo, *, files_metadata: info, **fetching)
    (source.path / "tokenizer.json").unlink()
    with pytest.raises(DownloadError, match=r"tokenizer\.json of org/repo could not be fetched"):
        ensure_present(source)
    assert not source.is_present


def test_a_model_without_a_known_tokenizer_is_refused_before_its_weights(tmp_path, monkeypatch):
    """Moonshot's repositories have only a `tiktoken.model`."""
    hub = write_hf(tmp_path / "upstream", TinyLlama())
    (hub / "tokenizer.json").rename(hub / "tiktoken.model")
    serve(monkeypatch, hub)
    source = resolve("hf:org/repo", tmp_path)
    with pytest.raises(DownloadError, match=r"has no tokenizer\.json, tekken\.json or tokenizer\.model.* GGUF"):
        ensure_present(source)
    assert not (source.path / "model.safetensors").exists()
    (source.path / "tokenizer.json").write_bytes((hub / "tiktoken.model").read_bytes())
    assert load_model(ensure_present(source)).name == "org/repo", "a tokenizer that the user put there"
    shutil.rmtree(source.path)
    config = json.loads((hub / "config.json").read_text()) | {"architectures": ["LlamaForCausalLMEagle3"]}
    (hub / "config.json").write_text(json.dumps(config))
    assert ensure_present(source).is_present, "a draft head needs none"


@pytest.mark.parametrize("files", [(), ("config.json", "tokenizer.json"), ("model.safetensors",)])
def test_a_repository_without_safetensors_does_not_count(tmp_path, monkeypatch, files):
    hub = tmp_path / "upstream"
    hub.mkdir()
    for name in (*files, "m-Q4_K_M.gguf"):
        (hub / name).touch()
    serve(monkeypatch, hub)
    source = resolve("hf:org/repo", tmp_path)
    with pytest.raises(DownloadError, match=r"has no config\.json with model\.safetensors.* write hf:org/repo:NAME\.gguf"):
        ensure_present(source)
    assert not source.is_present


def test_failure_of_the_library_becomes_ours(tmp_path, monkeypatch):
    def snapshot_download(repo: str, *, local_dir: Path, revision: str, allow_patterns: list[str]) -> None:
        raise RuntimeError("401 Client Error\nmore")

    install(monkeypatch, snapshot_download=snapshot_download)
    with pytest.raises(DownloadError, match=r"org/repo could not be fetched.*401 Client Error") as caught:
        ensure_present(resolve("hf:org/repo", tmp_path))
    assert "HF_TOKEN" in caught.value.remedy


@pytest.mark.parametrize(("number", "cause"), [(errno.ENOSPC, "the disk is full"), (errno.EACCES, "permissions")])
def test_a_fault_of_the_disk_is_not_one_of_the_network(tmp_path, monkeypatch, number, cause):
    def snapshot_download(repo: str, *, local_dir: Path, revision: str, allow_patterns: list[str]) -> None:
        raise OSError(number, "Why")

    install(monkeypatch, snapshot_download=snapshot_download)
    with pytest.raises(DownloadError, match=cause) as caught:
        ensure_present(resolve("hf:org/repo", tmp_path))
    assert "network" not in str(caught.value)


@pytest.mark.parametrize("said", ["Got: ConnectError: Name or service not known", "Name or service not known.", "Why:"])
def test_what_the_library_says_becomes_a_sentence(tmp_path, monkeypatch, said):
    def snapshot_download(repo: str, *, local_dir: Path, revision: str, allow_patterns: list[str]) -> None:
        raise RuntimeError(said)

    install(monkeypatch, snapshot_download=snapshot_download)
    with pytest.raises(DownloadError, match=r"hub: (ConnectError: )?(Name or service not known|Why)\. Check the name"):
        ensure_present(resolve("hf:org/repo", tmp_path))


def test_without_the_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DownloadError, match="need the package huggingface_hub") as caught:
        ensure_present(resolve("hf:org/repo", tmp_path))
    assert "pip install '.[hf]'" in caught.value.remedy
