"""From text to the token cache: right numbers, bounded memory, and nothing half-made whatever happens."""

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from data import prepare as prepare_module
from data.config import DataConfig
from data.prepare import Corpus, prepare
from data.tokenizer import BpeTokenizer, ByteTokenizer, CharTokenizer

PROSE = "The quick brown fox jumps over the lazy dog, and it's 42 years old.\n" * 50


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(PROSE)
    return path


def entries(tmp_path):
    """The finished entries of the cache, and what is hidden beside them."""
    found = list((tmp_path / "glassgpt-cache").glob("*"))
    return [path for path in found if path.name[0] != "."], [path for path in found if path.name[0] == "."]


def run(code, **options):
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_tokens_are_those_of_the_text_the_first_and_the_second_time(text, tmp_path, kind):
    config = DataConfig(source=str(text), tokenizer=kind, bpe_vocab_size=280)
    own = {
        "char": lambda: CharTokenizer("".join(sorted(set(PROSE)))),
        "byte": ByteTokenizer,
        "bpe": lambda: BpeTokenizer.train([PROSE], 280),
    }[kind]()
    made, found = prepare(config), prepare(config, show_progress=False)
    for corpus in (made, found):
        assert corpus.tokens.tolist() == own.encode(PROSE)
        assert corpus.tokens.dtype == np.uint16
        assert isinstance(corpus.tokens, np.memmap)
        assert corpus.tokenizer.hash == own.hash
        assert corpus.source == str(text)
        assert len(corpus.fingerprint) == 64
    assert [len(found) for found in entries(tmp_path)] == [1, 0]


def test_the_entry_describes_itself(text, tmp_path):
    corpus = prepare(DataConfig(source=str(text), tokenizer="char"))
    (folder,), _ = entries(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == ["header.json", "tokenizer.json", "tokens.bin"]
    header = json.loads((folder / "header.json").read_text())
    assert header["n_tokens"] == len(PROSE)
    assert header["vocab_size"] == len(set(PROSE))
    assert header["tokenizer_hash"] == corpus.tokenizer.hash
    assert header["sha256"] == hashlib.sha256((folder / "tokens.bin").read_bytes()).hexdigest()


def test_gpt2_tokens_with_an_end_of_text_between_files(gpt2, tmp_path, monkeypatch):
    monkeypatch.setattr("data.tokenizer.Gpt2Tokenizer.fetch", lambda: gpt2)
    (tmp_path / "set").mkdir()
    (tmp_path / "set/a.txt").write_text("one")
    (tmp_path / "set/b.txt").write_text("two\n")
    corpus = prepare(DataConfig(source=str(tmp_path / "set"), tokenizer="gpt2"))
    assert corpus.tokens.tolist() == [*gpt2.encode("one"), 50256, *gpt2.encode("two\n")]
    joined = prepare(DataConfig(source=str(tmp_path / "set"), tokenizer="char"))
    assert joined.tokenizer.decode(joined.tokens) == "one\n\ntwo\n"


def test_more_than_65536_ids_need_32_bits(tmp_path):
    characters = "".join(map(chr, [*range(0x4E00, 0xA000), *range(0x20000, 0x2A6E0), *range(0xAC00, 0xD7A4)]))
    assert len(characters) > 65536
    (tmp_path / "a.txt").write_text(characters, encoding="utf-8")
    corpus = prepare(DataConfig(source=str(tmp_path / "a.txt"), tokenizer="char"))
    assert corpus.tokens.dtype == np.uint32
    assert corpus.tokens.max() == len(characters) - 1


@pytest.mark.parametrize(
    ("n_tokens", "fraction", "n_train"),
    [(1_115_394, 0.1, 1_003_854), (10, 0.9, 1), (10, 0.3, 7), (7, 0.5, 3), (1_000_003, 0.001, 999_002)],
)
def test_the_split_is_by_position_and_exact(n_tokens, fraction, n_train):
    tokens = (np.arange(n_tokens) % 200).astype(np.uint16)
    split = Corpus(tokens, ByteTokenizer(), "", "").split(fraction, block_size=0)
    assert (len(split.train), len(split.val)) == (n_train, n_tokens - n_train)
    assert split.val_n_bytes == len(split.val)
    assert np.shares_memory(split.val, tokens)
    assert np.array_equal(np.concatenate([split.train, split.val]), tokens)


def test_tiny_shakespeare_has_the_known_numbers():
    path = Path(__file__).parents[2].parent / "shared" / "data" / "tinyshakespeare.txt"
    if not path.is_file():
        pytest.skip("tiny Shakespeare is not on this machine")
    corpus = prepare(DataConfig(source=str(path), tokenizer="char"))
    split = corpus.split(0.1, 256)
    assert (corpus.tokenizer.vocab_size, len(split.train), len(split.val)) == (65, 1_003_854, 111_540)
    assert corpus.tokenizer.decode(corpus.tokens[:20]) == "First Citizen:\nBefor"


def test_a_corpus_too_short_for_a_block_says_what_fits():
    corpus = Corpus(np.zeros(100, np.uint16), ByteTokenizer(), "", "")
    assert len(corpus.split(0.1, 9).val) == 10
    with pytest.raises(
        ValueError, match=r"90 tokens for training and 10 for validation.*the largest that fits both is 9"
    ):
        corpus.split(0.1, 10)
    with pytest.raises(ValueError, match="no block_size fits both"):
        corpus.split(0.001, 1)


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda folder: os.truncate(folder / "tokens.bin", 10), "tokens.bin has 10 bytes"),
        (lambda folder: (folder / "tokens.bin").unlink(), "No such file"),
        (lambda folder: (folder / "header.json").write_text("{"), "damaged"),
        (lambda folder: (folder / "header.json").write_text("[]"), "damaged"),
        (lambda folder: (folder / "header.json").write_text('{"dtype": "no"}'), "damaged"),
        (lambda folder: (folder / "tokenizer.json").write_text('{"name": "byte"}'), "tokenizer.json does not have"),
        (lambda folder: (folder / "tokenizer.json").write_bytes(b"\xff"), "cannot read the tokenizer"),
        (
            lambda folder: (folder / "tokens.bin").write_bytes(b"\x01" + (folder / "tokens.bin").read_bytes()[1:]),
            "does not have the hash",
        ),
    ],
)
def test_a_damaged_entry_is_made_again_with_a_notice(text, tmp_path, capsys, damage, what):
    config = DataConfig(source=str(text), tokenizer="char")
    expected = prepare(config).tokens.tolist()
    (folder,), _ = entries(tmp_path)
    damage(folder)
    capsys.readouterr()
    corpus = prepare(config, show_progress=False)
    notice = capsys.readouterr().err
    assert what in notice
    assert notice.count("\n") == 1
    assert corpus.tokens.tolist() == expected
    assert [len(found) for found in entries(tmp_path)] == [1, 0]
    prepare(config, show_progress=False)
    assert capsys.readouterr().err == ""


def test_what_is_prepared_needs_no_vocabulary_from_elsewhere(tmp_path, text, gpt2, monkeypatch, capsys):
    config = DataConfig(source=str(text), tokenizer="gpt2")
    monkeypatch.setattr("data.tokenizer.Gpt2Tokenizer.fetch", lambda: gpt2)
    tokens = prepare(config, show_progress=False).tokens.tolist()

    def unreachable(_):
        raise ConnectionError

    monkeypatch.undo()
    monkeypatch.setattr("tiktoken.get_encoding", unreachable)
    monkeypatch.setenv("GLASSGPT_CACHE", str(tmp_path / "glassgpt-cache"))
    corpus = prepare(config, show_progress=False)
    assert corpus.tokens.tolist() == tokens
    assert corpus.tokenizer.encode("Hello world") == [15496, 995]
    with pytest.raises(ValueError, match="TIKTOKEN_CACHE_DIR"):
        prepare(DataConfig(source=__file__, tokenizer="gpt2"), show_progress=False)
    assert capsys.readouterr().err == ""


def test_settings_and_content_make_their_own_entries(text, tmp_path):
    for options in ({"tokenizer": "byte"}, {"bpe_vocab_size": 260}, {"bpe_vocab_size": 261}, {"bpe_vocab_size": 260}):
        prepare(DataConfig(source=str(text), **options), show_progress=False)
    assert len(entries(tmp_path)[0]) == 3
    text.write_text("Something else.")
    prepare(DataConfig(source=str(text), tokenizer="byte"), show_progress=False)
    assert len(entries(tmp_path)[0]) == 4


def test_a_small_corpus_says_that_bpe_found_fewer_tokens(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("ab ab ab")
    prepare(DataConfig(source=str(tmp_path / "a.txt")), show_progress=False)
    assert capsys.readouterr().err.endswith("a.txt yields 258 tokens of 1024\n")


@pytest.mark.parametrize("kind", ["char", "byte", "bpe"])
def test_a_single_character_is_warned_about_every_time(tmp_path, capsys, kind):
    (tmp_path / "a.txt").write_text("苹" * 3000)
    for _ in range(2):
        corpus = prepare(DataConfig(source=str(tmp_path / "a.txt"), tokenizer=kind), show_progress=False)
        assert "holds a single distinct character" in capsys.readouterr().err
    assert corpus.tokenizer.decode(corpus.tokens) == "苹" * 3000


def test_a_text_of_nothing_but_a_byte_order_mark_holds_no_text(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf")
    for kind in ("char", "byte", "bpe"):
        with pytest.raises(ValueError, match="holds no text"):
            prepare(DataConfig(source=str(tmp_path / "a.txt"), tokenizer=kind), show_progress=False)
    assert entries(tmp_path) == ([], [])


def test_bad_bytes_leave_nothing_behind(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine" * 1_000_000 + b"\xff")
    with pytest.raises(ValueError, match="offset 4000000"):
        prepare(DataConfig(source=str(tmp_path / "a.txt"), tokenizer="byte"), show_progress=False)
    assert entries(tmp_path) == ([], [])


def test_a_cache_folder_that_cannot_be_written_is_named(text, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--data\.cache_dir"):
        prepare(DataConfig(source=str(text), cache_dir=str(tmp_path / "file" / "sub")), show_progress=False)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(prepare_module, "_publish", full)
    with pytest.raises(ValueError, match="No space left on device"):
        prepare(DataConfig(source=str(text)), show_progress=False)
    assert entries(tmp_path) == ([], [])


def test_the_cache_folder_follows_the_environment(monkeypatch):
    assert prepare_module.cache_folder(DataConfig(cache_dir="/a/b")) == Path("/a/b")
    monkeypatch.setenv("GLASSGPT_CACHE", "/c")
    assert prepare_module.cache_folder(DataConfig()) == Path("/c")
    monkeypatch.delenv("GLASSGPT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/d")
    assert prepare_module.cache_folder(DataConfig()) == Path("/d/glassgpt")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert prepare_module.cache_folder(DataConfig()) == Path.home() / ".cache/glassgpt"
    with pytest.raises(ValueError, match=r"no home directory is known for ~nobody-here/x; .*--data.cache_dir"):
        prepare_module.cache_folder(DataConfig(cache_dir="~nobody-here/x"))


PREPARE = (
    "from data.config import DataConfig; from data.prepare import prepare; corpus = prepare(DataConfig(source={!r}{}))"
)


def test_two_processes_at_once_make_one_entry(tmp_path):
    (tmp_path / "a.txt").write_text(PROSE * 300)
    code = PREPARE.format(str(tmp_path / "a.txt"), "") + "; print(len(corpus.tokens), int(corpus.tokens.sum()))"
    both = [run(code), run(code)]
    outputs = [process.communicate() for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert [len(found) for found in entries(tmp_path)] == [1, 0]


def test_one_that_comes_second_keeps_a_good_entry_and_replaces_a_damaged_one(text, tmp_path):
    prepare(DataConfig(source=str(text), tokenizer="byte"), show_progress=False)
    (folder,), _ = entries(tmp_path)

    def publish_a_copy():
        shutil.copytree(spare, beside := folder.parent / ".copy")
        (beside / "header.json").touch()
        prepare_module._publish(beside, folder)
        shutil.rmtree(beside, ignore_errors=True)

    spare = tmp_path / "spare"
    shutil.copytree(folder, spare)
    inode = (folder / "tokens.bin").stat().st_ino
    publish_a_copy()
    assert (folder / "tokens.bin").stat().st_ino == inode
    os.truncate(folder / "tokens.bin", 3)
    publish_a_copy()
    assert (folder / "tokens.bin").stat().st_size == 2 * len(PROSE)
    assert [len(found) for found in entries(tmp_path)] == [1, 0]


def test_a_kill_leaves_nothing_that_passes_for_finished(tmp_path):
    (tmp_path / "a.txt").write_text(PROSE * 6000)
    config = DataConfig(source=str(tmp_path / "a.txt"), tokenizer="byte")
    process = run(PREPARE.format(config.source, ", tokenizer='byte'"))
    half_made = []
    while process.poll() is None and not half_made:
        half_made = [path for path in (tmp_path / "glassgpt-cache").glob(".*/tokens.bin") if path.stat().st_size]
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert half_made
    assert entries(tmp_path)[0] == []
    os.utime(half_made[0], (1, 1))
    os.utime(half_made[0].parent, (1, 1))
    corpus = prepare(config, show_progress=False)
    assert len(corpus.tokens) == len(PROSE) * 6000
    assert [len(found) for found in entries(tmp_path)] == [1, 0]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell a process's peak memory")
@pytest.mark.parametrize(("kind", "n_megabytes"), [("char", 30), ("bpe", 30)])
def test_memory_does_not_grow_with_the_text(tmp_path, kind, n_megabytes):
    (tmp_path / "small.txt").write_text(PROSE * 300)
    (tmp_path / "large.txt").write_text(PROSE * (n_megabytes * 1_000_000 // len(PROSE)))
    # VmHWM and not ru_maxrss, which begins with the peak of the process that started this one.
    code = PREPARE + "; print(open('/proc/self/status').read().split('VmHWM:')[1].split()[0])"
    peaks = []
    for name in ("small.txt", "large.txt"):
        process = run(code.format(str(tmp_path / name), f", tokenizer={kind!r}"))
        output, errors = process.communicate()
        assert process.returncode == 0, errors
        peaks.append(int(output) / 1024)
    assert peaks[1] < 200
    assert peaks[1] - peaks[0] < n_megabytes
