"""An index of documents: what it finds, what a second run does, and what a killed process leaves."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from penstock.search.documents import MAX_BYTES, Block, Unreadable, find, read
from penstock.search.index import Changes, Reader, create, update
from penstock.search.passages import MAX_CHARS, Passage, cut, halved
from penstock.types.errors import ConfigError
from support.work_time import growth

_OPENED: list[Reader] = []
WORDS = ("red", "green", "blue", "cat", "dog")


def embed(texts: Sequence[str]) -> np.ndarray:
    """A vector counts words."""
    return np.array([[text.count(word) for word in WORDS] for text in texts], np.float32) + 1e-3


def slowly(texts: Sequence[str]) -> np.ndarray:
    time.sleep(0.05)
    return embed(texts)


def run(path: Path, folder: Path) -> Changes:
    create(path, folder, "toy")
    return [*update(path, folder, embed)][-1]


def passages_of(text: str, name: str = "a.md") -> list[tuple[str, str]]:
    return [(passage.heading, passage.text) for passage in cut(read(Path(name), text.encode()))]


def asked(reader: Reader, *questions: str, num: int = 1) -> list[list[str]]:
    return [[hit.text for hit in hits] for hits in reader.nearest(embed(questions), num)]


def opened(path: Path) -> Reader:
    """Open an index until the test ends."""
    _OPENED.append(Reader(path))
    return _OPENED[-1]


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while _OPENED:
        _OPENED.pop().close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "docs"
    found.mkdir()
    (found / "colours.md").write_text("# Colours\n\nGrass is green, green.\n\n## Of the sky\n\nThe sky is blue.")
    (found / "pets.txt").write_text("The cat sleeps.")
    return found


def test_the_nearest_passages_come_first_with_their_place(folder: Path, tmp_path: Path) -> None:
    changes = run(tmp_path / "a.index", folder)
    assert (changes.num_new, changes.num_same, changes.num_gone) == (2, 0, 0)
    reader = opened(tmp_path / "a.index")
    assert (reader.embedder, reader.num_passages) == ("toy", 3)
    [[hit]] = reader.nearest(embed(["blue?"]), 1)
    assert (hit.path, hit.heading, hit.text) == ("colours.md", "Colours > Of the sky", "The sky is blue.")
    assert hit.score == pytest.approx(1.0, abs=1e-3)
    assert asked(reader, "green", "cat") == [["Grass is green, green."], ["The cat sleeps."]]
    assert len(asked(reader, "green", num=10)[0]) == 3


def test_a_second_run_reads_what_has_changed_and_forgets_what_is_gone(folder: Path, tmp_path: Path) -> None:
    run(tmp_path / "a.index", folder)
    reader = opened(tmp_path / "a.index")
    (folder / "pets.txt").write_text("The dog barks.")
    (folder / "more.txt").write_text("A red car.")
    (folder / "colours.md").unlink()
    changes = run(tmp_path / "a.index", folder)
    assert (changes.num_new, changes.num_same, changes.num_gone) == (2, 0, 1)
    assert asked(reader, "dog", "red") == [["The dog barks."], ["A red car."]], "an open reader sees it"
    assert "blue" not in str(asked(reader, "blue", num=9))
    changes = run(tmp_path / "a.index", folder)
    assert (changes.num_new, changes.num_same, changes.num_gone) == (0, 2, 0)


def test_what_can_not_be_read_is_named_and_what_was_read_of_it_stays(folder: Path, tmp_path: Path) -> None:
    run(tmp_path / "a.index", folder)
    (folder / "pets.txt").write_bytes(b"\xff\xfe cat")
    changes = run(tmp_path / "a.index", folder)
    assert changes.unreadable == {"pets.txt": "it is not UTF-8"}
    assert asked(opened(tmp_path / "a.index"), "cat") == [["The cat sleeps."]]


def test_a_deleted_file_is_gone_though_one_whose_name_begins_its_own_is_unreadable(folder: Path, tmp_path: Path) -> None:
    (folder / "pets.txt.md").write_text("The dog barks.")
    run(tmp_path / "a.index", folder)
    (folder / "pets.txt").write_bytes(b"\xff\xfe cat")
    (folder / "pets.txt.md").unlink()
    assert run(tmp_path / "a.index", folder).num_gone == 1
    assert "dog" not in str(asked(opened(tmp_path / "a.index"), "dog", num=9))


SLOW_UPDATE = """
import sys, time
from pathlib import Path
import numpy as np
from penstock.search.index import update

def embed(texts):
    time.sleep(0.05)
    return np.ones((len(texts), 5), np.float32)

for _ in update(Path(sys.argv[1]), Path(sys.argv[2]), embed):
    pass
"""


def test_a_killed_update_leaves_whole_files_and_the_next_one_goes_on(tmp_path: Path) -> None:
    folder, path = tmp_path / "docs", tmp_path / "a.index"
    folder.mkdir()
    text = "\n\n".join(["red " * 180] * 3)
    for number in range(400):
        (folder / f"{number:03}.txt").write_text(text)
    assert len(passages_of(text)) == 3
    create(path, folder, "toy")
    for _ in range(3):
        before = opened(path).num_passages
        with subprocess.Popen([sys.executable, "-c", SLOW_UPDATE, path, folder]) as process:
            deadline = time.monotonic() + 60
            while opened(path).num_passages == before and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.005)
            process.kill()
        reader = opened(path)
        counts = reader._base.execute("SELECT count(*) FROM passages GROUP BY path").fetchall()
        assert counts
        assert {count for (count,) in counts} == {3}
        assert reader._base.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    run(path, folder)
    assert opened(path).num_passages == 1200


def test_two_updates_at_once_end_as_one_would(tmp_path: Path) -> None:
    folder, path = tmp_path / "docs", tmp_path / "a.index"
    folder.mkdir()
    for number in range(300):
        (folder / f"{number}.txt").write_text(f"red {number}\n\n" + "word " * 200)
    create(path, folder, "toy")
    threads = [threading.Thread(target=lambda: list(update(path, folder, slowly))) for _ in range(3)]
    for thread in threads:
        thread.start()
    reader = opened(path)
    while any(thread.is_alive() for thread in threads):
        asked(reader, "red", num=3)
    for thread in threads:
        thread.join()
    alone = tmp_path / "b.index"
    run(alone, folder)
    assert opened(path).num_passages == opened(alone).num_passages


def test_an_index_stays_with_its_embedding_model(folder: Path, tmp_path: Path) -> None:
    run(tmp_path / "a.index", folder)
    with pytest.raises(ConfigError, match="was made with the embedder toy, not other"):
        create(tmp_path / "a.index", folder, "other")
    with pytest.raises(ConfigError, match="was made from the folder"):
        create(tmp_path / "a.index", tmp_path, "toy")
    (folder / "new.txt").write_text("new")
    with pytest.raises(ConfigError, match="has vectors of 5 numbers, not 3"):
        list(update(tmp_path / "a.index", folder, lambda texts: np.ones((len(texts), 3), np.float32)))
    with pytest.raises(ConfigError, match="vectors of 5 numbers, not 2"):
        opened(tmp_path / "a.index").nearest(np.ones((1, 2), np.float32), 1)


def test_another_embedding_model_of_the_same_name_and_width_is_noticed(folder: Path, tmp_path: Path) -> None:
    probe = np.array([0.1, -0.3, 2.0], np.float32)
    create(tmp_path / "a.index", folder, "toy", probe[::-1])  # a run that was killed before it embedded anything
    create(tmp_path / "a.index", folder, "toy", probe)
    [*update(tmp_path / "a.index", folder, embed)]
    create(tmp_path / "a.index", folder, "toy", 3 * probe + np.float32(0.01))
    reader = opened(tmp_path / "a.index")
    reader.probe = probe.tobytes()
    assert asked(reader, "cat") == [["The cat sleeps."]]
    for other in (probe[::-1], probe[:2]):
        with pytest.raises(ConfigError, match="than the one that is called toy now"):
            create(tmp_path / "a.index", folder, "toy", other)
        reader.probe = other.tobytes()
        with pytest.raises(ConfigError, match="another model"):
            asked(reader, "cat")
    for damaged in ("hex", "abcdef", b"hex"):
        with sqlite3.connect(tmp_path / "a.index") as base:
            base.execute("UPDATE about SET value = ? WHERE key = 'probe'", (damaged,))
        base.close()
        with pytest.raises(ConfigError, match="is damaged"):
            asked(reader, "cat")
        with pytest.raises(ConfigError, match="is damaged"):
            create(tmp_path / "a.index", folder, "toy", probe)


def test_nothing_is_added_to_another_database(folder: Path, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.index") as base:
        base.execute("CREATE TABLE about (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        with pytest.raises(ConfigError, match="is not an index"):
            create(tmp_path / "a.index", folder, "toy")
        assert base.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall() == [("about",)]
        assert base.execute("SELECT * FROM about").fetchall() == []
        base.execute("DROP TABLE about")
        base.execute("CREATE TABLE other (key TEXT)")
        base.commit()
        with pytest.raises(ConfigError, match="can't be written as an index"):
            create(tmp_path / "a.index", folder, "toy")
        assert base.execute("SELECT name FROM sqlite_master").fetchall() == [("other",)]
    base.close()


@pytest.mark.parametrize("content", [None, b"no database, but long enough to be looked at as one", b""])
def test_what_is_no_index_is_refused(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "a.index"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match="index"):
        opened(path)


def test_an_empty_index_finds_nothing(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    run(tmp_path / "a.index", tmp_path / "docs")
    assert asked(opened(tmp_path / "a.index"), "red") == [[]]


def test_an_index_is_one_file_that_can_be_replaced_and_read_where_nobody_writes(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    run(place / "a.index", folder)
    assert [path.name for path in place.iterdir()] == ["a.index"]
    reader = opened(place / "a.index")
    (folder / "pets.txt").write_text("The dog barks.")
    (folder / "colours.md").unlink()
    run(tmp_path / "b.index", folder)
    (tmp_path / "b.index").replace(place / "a.index")
    assert asked(reader, "blue", num=9) == [["The dog barks."]]
    place.chmod(0o555)
    assert asked(opened(place / "a.index"), "dog") == [["The dog barks."]]
    place.chmod(0o755)
    (place / "a.index").unlink()
    with pytest.raises(ConfigError, match="does not exist"):
        asked(reader, "dog")


def test_odd_names_and_texts_stop_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / os.fsdecode(b"bad\xff.txt")).write_text("red")
    monkeypatch.setattr("penstock.search.index.read", lambda path, data: [Block("\ud800 " + data.decode())])
    (folder / os.fsdecode(b"bad\xff")).mkdir()
    (folder / os.fsdecode(b"bad\xff") / "a.txt").write_text("red")
    changes = run(tmp_path / "a.index", folder)
    assert changes.unreadable == dict.fromkeys(("bad?.txt", "bad?/a.txt"), "its name is not UTF-8")
    assert asked(opened(tmp_path / "a.index"), "cat") == [["? The cat sleeps."]]


def test_what_is_too_large_or_no_file_is_not_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAX_BYTES, ".txt", 1 << 20)
    with (folder / "huge.txt").open("wb") as file:
        file.truncate(1 << 40)
    (folder / "deep.txt").mkdir()
    os.mkfifo(folder / "pipe.txt")
    (folder / "link.txt").symlink_to("link.txt")
    changes = run(tmp_path / "a.index", folder)
    not_files = dict.fromkeys(("link.txt", "pipe.txt"), "it is not a file")
    assert changes.unreadable == {"huge.txt": "it has more than 1 MiB", **not_files}


def test_a_folder_that_can_not_be_listed_is_not_gone(folder: Path, tmp_path: Path) -> None:
    (folder / "deep").mkdir()
    (folder / "deep" / "a.txt").write_text("A red car.")
    run(tmp_path / "a.index", folder)

    def found(folder: Path, on_error) -> list[Path]:
        error = PermissionError(13, "Permission denied", str(folder / "deep"))
        on_error(error)
        return [folder / "pets.txt"]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("penstock.search.index.find", found)
        changes = run(tmp_path / "a.index", folder)
    assert (changes.num_gone, changes.unreadable) == (1, {"deep/": "it can't be listed: Permission denied"})
    assert asked(opened(tmp_path / "a.index"), "red") == [["A red car."]]


def test_a_folder_that_is_empty_now_leaves_the_index_as_it_is(folder: Path, tmp_path: Path) -> None:
    run(tmp_path / "a.index", folder)
    folder.rename(tmp_path / "unmounted")
    folder.mkdir()
    with pytest.raises(ConfigError, match="has no documents any more"):
        run(tmp_path / "a.index", folder)
    assert asked(opened(tmp_path / "a.index"), "cat") == [["The cat sleeps."]]


def test_files_are_found_below_the_folder_alone(tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    (tmp_path / "secret.txt").write_text("no")
    for name in ("a.md", "deep/b.HTML", ".git/c.txt", "d.py"):
        (folder / name).write_text("x")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    assert [path.relative_to(folder).as_posix() for path in find(folder, print)] == ["a.md", "deep/b.HTML"]


def test_the_visible_text_of_a_page_is_read() -> None:
    page = (
        "<html><head><title>t</title><style>p {}</style><body><nav>menu</nav><h2>\n Big &amp; <b>bold</b>\n</h2>"
        "<p>One\n two <i>or</i> three</p><script>if (a < b) {}</script><ul><li>four</li><li>five</ul>"
        "<table><tr><td>Name</td><td>Value</td></tr></table><dl><dt>a</dt><dd>b</dd></dl><pre># on Linux\nmake</pre>"
    )
    [(heading, text)] = passages_of(page, "a.html")
    assert heading == "Big & bold"
    assert text.split("\n\n") == ["One two or three", "four", "five", "Name Value", "a", "b", "# on Linux\nmake"]


def test_the_indentation_of_preformatted_text_is_kept() -> None:
    code = "    if a:\n        b()\n\n    c()"
    page = f"<p>a  <b>b</b>  c</p><pre><code>\n{code}\n</code></pre><p> d"
    assert passages_of(page, "a.html") == [("", f"a b c\n\n{code}\n\nd")]
    long = "\n".join(f"{'    ' * (number % 3)}line_{number} = call(one, other)" for number in range(100))
    for page, name in ((f"<pre>{long}</pre>", "a.html"), (long, "a.md")):
        assert "\n".join(text for _, text in passages_of(page, name)) == long


def test_headings_are_those_of_markdown_and_not_in_code() -> None:
    text = "# A\n\ntext\n\n```sh\n# no heading\nmake\n```\n\n## B ##\nmore"
    assert passages_of(text) == [("A", "text\n\n```sh\n# no heading\nmake\n```"), ("A > B", "more")]
    assert passages_of("# C#\ntext\n## F# ##\nmore\n# ##\nlast") == [("C#", "text"), ("C# > F#", "more\n\nlast")]
    assert passages_of("# no heading\nmake", "a.txt") == [("", "# no heading\nmake")]
    assert passages_of("# Ask\n## Why?\n## How?\nSo.") == [("", "Ask > Why?"), ("Ask > How?", "So.")]
    assert passages_of("```\n# open") == [("", "```\n# open")]
    nested = "````\n```sh\n# no heading\n```\n# nor this\n````"
    assert passages_of(f"# A\n{nested}\n## B\nmore") == [("A", nested), ("A > B", "more")]
    assert passages_of("```\n```sh\n# no heading\n```\n# A\nmore") == [("", "```\n```sh\n# no heading\n```"), ("A", "more")]
    assert passages_of("```code``` in a line\n# A\nmore") == [("", "```code``` in a line"), ("A", "more")]


@pytest.mark.parametrize(
    ("name", "text", "size"),
    [
        ("a.md", lambda size: "# a" + " " * size + "b", 250),
        ("a.html", lambda size: "<nav>" * size + "</p>" * size + "</nav>", 2_000),
    ],
    ids=["md", "html"],
)
def test_the_time_for_a_document_is_linear(name: str, text: Callable[[int], str], size: int) -> None:
    assert growth(lambda size: passages_of(text(size), name), size) < 8


def test_the_first_end_tag_of_a_kind_ends_what_is_not_visible() -> None:
    assert passages_of("<nav>a<script>b<nav>c</script>d</nav>e", "a.html") == [("", "e")]


def test_a_pdf_that_can_not_be_read_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"%PDF-1.4 broken")
    with pytest.raises(Unreadable, match=r"pypdf is not installed|can't be read as a PDF"):
        read(tmp_path / "a.pdf", b"")


def test_passages_are_whole_and_none_is_too_long() -> None:
    text = "# A\n\nFirst. " + "Many words stand here. " * 100 + "\n\n### C\n" + "x" * 3000 + "\n\n## B\nlast"
    passages = passages_of(text)
    assert passages[0][1].startswith("First. Many words")
    assert passages[-1] == ("A > B", "last")
    assert "A > C" in {heading for heading, _ in passages}
    assert "".join(text for _, text in passages).count("x") == 3000
    for one in (text, "a\n\n" * 3000, "# " + "h" * 100_000 + "\ntext"):
        assert all(len(text) <= MAX_CHARS and len(heading) <= 200 for heading, text in passages_of(one))
    assert not passages_of("")


@pytest.mark.parametrize(
    ("heading", "text"),
    [
        ("A > B", "First one. " * 70),
        ("A", "\n".join(f"| {number} | x |" for number in range(50))),
        ("h" * 200, "x" * 3),
        ("h", "x" * 799),
        ("", "\u8a9e" * 800),
    ],
)
@pytest.mark.parametrize("most", [1, 2, 50, 300])
def test_passages_that_do_not_fit_are_divided_and_keep_their_text(heading: str, text: str, most: int) -> None:
    """A character of a word is a token here."""
    asked: list[int] = []

    def fit(texts: Sequence[str]) -> list[bool]:
        asked.append(len(texts))
        return [len("".join(one.split())) <= most for one in texts]

    found = [*halved([Passage(heading, text), Passage("", "x")], fit)]
    assert found.pop() == Passage("", "x")
    assert asked[0] == 2, "all are asked for at once"
    assert "".join("".join(one.text for one in found).split()) == "".join(text.split())
    assert all(fit([one.heading + one.text for one in found]))
    assert all(heading.startswith(one.heading) for one in found)


def test_the_remedy_for_an_index_of_another_format_works(tmp_path: Path) -> None:
    folder, path = tmp_path / "docs", tmp_path / "docs.index"
    folder.mkdir()
    create(path, folder, "e")
    with sqlite3.connect(path) as base:
        base.execute("UPDATE about SET value = '1' WHERE key = 'format'")
    base.close()
    for attempt in (lambda: create(path, folder, "e"), lambda: opened(path)):
        with pytest.raises(ConfigError) as error:
            attempt()
        assert error.value.remedy == "Delete it, and run `penstock index FOLDER`."
    path.unlink()
    create(path, folder, "e")
