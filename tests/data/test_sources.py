"""Files, folders, globs and Python's documentation; data sets are in test_hub.py."""

import os
import subprocess
import sys

import pytest

from data import sources
from data.config import DataConfig
from data.pydocs import pydocs_fingerprint, read_pydocs
from data.sources import open_source


def read(source, **options):
    return ["".join(document) for document in open_source(DataConfig(source=str(source), **options)).documents()]


def refusal(source, **options):
    with pytest.raises(ValueError) as refused:
        read(source, **options)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_line_endings_become_newlines_also_across_reads(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\rthree\n\r\n\r\rfour\r")
    for size in (1, 2, 3, 4, 5, 100):
        monkeypatch.setattr(sources, "READ_BYTES", size)
        assert read(tmp_path / "a.txt") == ["one\ntwo\nthree\n\n\n\nfour\n"]


@pytest.mark.parametrize(
    ("encoding", "content"),
    [
        ("utf-8", "\ufeffäöü苹果😀\n".encode()),
        ("utf-8", "äöü苹果😀\r\n".encode()),
        ("utf-8-sig", "\ufeffäöü苹果😀\n".encode()),
        ("utf-16", "äöü苹果😀\n".encode("utf-16")),
        ("utf-16-le", "\ufeffäöü苹果😀\n".encode("utf-16-le")),
        ("gb18030", "äöü苹果😀\n".encode("gb18030")),
    ],
)
def test_encodings_with_and_without_byte_order_mark(tmp_path, monkeypatch, encoding, content):
    (tmp_path / "a.txt").write_bytes(content)
    for size in (1, 3, 100):
        monkeypatch.setattr(sources, "READ_BYTES", size)
        assert read(tmp_path / "a.txt", encoding=encoding) == ["äöü苹果😀\n"]


@pytest.mark.parametrize("size", [1, 2, 7, 1 << 20])
@pytest.mark.parametrize(
    ("content", "encoding", "offset"),
    [
        (b"good text " + b"\xff", "utf-8", 10),
        ("ä苹".encode() + b"\xe8\x8bx more", "utf-8", 5),
        ("ä苹".encode() + b"\xe8\x8b", "utf-8", 5),
        ("ab".encode("utf-16-le") + b"\x00\xdcx\x00", "utf-16-le", 4),
        (b"abc\x80", "ascii", 3),
    ],
)
def test_the_offset_of_a_byte_that_does_not_decode(tmp_path, monkeypatch, size, content, encoding, offset):
    monkeypatch.setattr(sources, "READ_BYTES", size)
    (tmp_path / "a.txt").write_bytes(content)
    message = refusal(tmp_path / "a.txt", encoding=encoding)
    assert f"a.txt is not {encoding}: the byte at offset {offset} does not decode" in message
    assert "--data.encoding" in message


def test_a_folder_is_read_recursively_in_sorted_order(tmp_path):
    for name in ("b.txt", "a/z.md", "a/y.TXT", "c.bin", ".hidden.txt", ".git/d.txt", "README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path) == ["README.md", "a/y.TXT", "a/z.md", "b.txt"]


def test_a_glob_takes_files_in_sorted_order(tmp_path):
    for name in ("b.txt", "a.txt", "c.log", "sub/d.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read(tmp_path / "*.txt") == ["a.txt", "b.txt"]
    assert read(tmp_path / "**/*.txt") == ["a.txt", "b.txt", "sub/d.txt"]
    assert read(tmp_path / "*.log") == ["c.log"]


def test_an_existing_file_wins_over_wildcards_in_its_name(tmp_path):
    (tmp_path / "a[1].txt").write_text("text")
    assert read(tmp_path / "a[1].txt") == ["text"]


def test_the_fingerprint_follows_the_content_and_not_the_place(tmp_path):
    def fingerprint(name, content, **options):
        (tmp_path / name).write_bytes(content)
        return open_source(DataConfig(source=str(tmp_path / name), **options)).fingerprint()

    first = fingerprint("a.txt", b"text")
    assert fingerprint("b.txt", b"text") == first
    assert fingerprint("a.txt", b"text", encoding="utf8") == first
    assert fingerprint("a.txt", b"texts") != first
    assert fingerprint("a.txt", b"text", encoding="latin-1") != first


def test_documents_can_be_read_again(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    source = open_source(DataConfig(source=str(tmp_path / "a.txt")))
    assert [[*document] for document in source.documents()] == [[*document] for document in source.documents()]


def test_what_cannot_be_read_is_refused_in_one_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").touch()
    (tmp_path / "void").mkdir()
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow/a.txt").touch()
    (tmp_path / "hollow/b.txt").touch()
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed/a.txt").write_text("x")
    (tmp_path / "mixed/a.json").write_text("{}")
    (tmp_path / "a.txt").write_text("x")
    assert "empty.txt is empty" in refusal("empty.txt")
    assert "folder void holds no text" in refusal("void")
    assert "all 2 files of hollow are empty" in refusal("hollow")
    assert "mixed mixes kinds of files" in refusal("mixed")
    assert "no such file or folder" in refusal("absent.txt")
    assert "no such file or folder" in refusal("folder/absent.txt")
    assert "no such file or folder" in refusal("a\0b")
    assert "no such file or folder" in refusal("word")
    assert "no such file or folder" in refusal("~nobody-here/x")
    assert "no file matches" in refusal("books/*.txt")
    assert "cannot read --data.source" in refusal("x" * 5000)
    assert "--data.encoding 'utf-9' is unknown" in refusal("a.txt", encoding="utf-9")
    assert "--data.encoding 'base64' is unknown" in refusal("a.txt", encoding="base64")
    assert "--data.encoding 'a\\x00' is unknown" in refusal("a.txt", encoding="a\0")
    assert "--data.split 'test': text files have only train" in refusal("a.txt", split="test")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_is_refused_without_waiting_for_it(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refusal(tmp_path / "pipe")


def test_pydocs_is_plain_english_of_the_promised_size():
    text = "\n\n".join(read_pydocs())
    assert 1_000_000 < len(text.encode()) < 3_000_000
    assert "json.dumps(obj, *, skipkeys=False" in text
    assert 'The "assert" statement' in text
    assert "\r" not in text
    assert len(set(text)) < 200
    words = text.lower().split()
    assert words.count("the") > len(words) / 50


def test_pydocs_is_the_same_in_every_process_and_imports_no_module_it_reads():
    code = (
        "import hashlib, sys; from data.pydocs import *; text = '|'.join(read_pydocs()); "
        "print(hashlib.sha256(text.encode()).hexdigest(), pydocs_fingerprint(), 'turtle' in sys.modules)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert outputs.pop().split()[1:] == [pydocs_fingerprint(), "False"]
    assert open_source(DataConfig()).fingerprint() == pydocs_fingerprint()


def test_repeats_is_text_between_random_sequences_that_come_four_times():
    source = open_source(DataConfig(source="repeats"))
    first, again = (
        [tuple(document) for _, document in zip(range(300), source.documents(), strict=False)] for _ in "ab"
    )
    assert first == again
    assert source.fingerprint() == open_source(DataConfig(source="repeats")).fingerprint() != pydocs_fingerprint()
    text = "".join(document[0] for document in first)
    assert "".join(read_pydocs()).encode("ascii", "ignore").decode().startswith(text[:100])
    lengths = set()
    for document in first:
        for copies in document[1:]:
            length = (len(copies) - 1) // 4
            assert copies == "\n" + 4 * copies[1 : 1 + length]
            lengths.add(length)
    assert lengths == set(range(4, 17))
    assert "".join(map("".join, first)).isascii()
