"""Every tokenizer: ids and back over any text, plain-data round trips, and one clear line for every misuse."""

import base64
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import regex
import rustbpe
import tiktoken
import tiktoken_ext.openai_public
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data.config import DataConfig
from data.pieces import cut_pieces, encode_pieces, join_documents
from data.tokenizer import BpeTokenizer, ByteTokenizer, CharTokenizer, Tokenizer, train_tokenizer

TEXT = "the cat sat on the mat, and the dog's bone is 1234 years old.\n\n  苹果发布了新产品。他吃了一个苹果。\n" * 20
BPE = BpeTokenizer.train([TEXT], 300)
any_text = st.text() | st.text(
    alphabet="ab 1'\n\r\t.,!?_。、りア\u3099苹果\u0301ſé\x1c\xa0\u2028<|endoftext|>s", max_size=60
)


@given(any_text.filter(bool))
def test_char_ids_are_positions_in_the_sorted_characters(text):
    tokenizer = CharTokenizer("".join(sorted(set(text))))
    assert tokenizer.encode(text) == [sorted(set(text)).index(character) for character in text]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(any_text)
def test_byte_ids_are_the_bytes(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(any_text)
def test_bpe_round_trip(text):
    assert BPE.decode(BPE.encode(text)) == text
    assert BPE.n_bytes(BPE.encode(text)) == len(text.encode())


@given(text=any_text)
def test_gpt2_round_trip(gpt2, text):
    assert gpt2.decode(gpt2.encode(text)) == text
    assert gpt2.n_bytes(gpt2.encode(text)) == len(text.encode())


def test_gpt2_gives_the_published_ids(gpt2):
    assert gpt2.encode("Hello world") == [15496, 995]
    assert gpt2.vocab_size == 50257
    assert gpt2.end_of_text == 50256
    assert 50256 not in gpt2.encode("<|endoftext|>")
    assert gpt2.decode([50256]) == "<|endoftext|>"
    assert gpt2.n_bytes([15496, 50256]) == 5


def test_bpe_gives_the_ids_of_the_library_that_trained_it():
    trained = rustbpe.Tokenizer()
    trained.train_from_iterator(iter([TEXT]), 300)
    assert BPE.encode(TEXT) == trained.encode(TEXT)
    assert BPE.vocab_size == 300


def test_bpe_of_a_small_corpus_has_fewer_tokens():
    tokenizer = BpeTokenizer.train(["ab ab ab"], 1024)
    assert tokenizer.vocab_size == 258  # "ab" and " ab"
    assert tokenizer.encode("ab ab") == [256, 257]


def test_bpe_vocabulary_too_small_for_bytes_is_refused_before_it_panics():
    with pytest.raises(ValueError, match="at least 257"):
        BpeTokenizer.train(["text"], 200)


@given(
    parts=st.lists(any_text, max_size=6),
    piece_chars=st.integers(1, 12),
    kind=st.sampled_from(["char", "byte", "bpe"]),
)
def test_tokens_of_the_pieces_are_the_tokens_of_the_text(parts, piece_chars, kind):
    text = "".join(parts)
    tokenizer = {"byte": ByteTokenizer(), "bpe": BPE, "char": CharTokenizer("".join(sorted({*text, "x"})))}[kind]
    check_pieces(parts, piece_chars, tokenizer)


@given(parts=st.lists(any_text, max_size=6), piece_chars=st.integers(1, 12))
def test_gpt2_tokens_of_the_pieces_are_the_tokens_of_the_text(gpt2, parts, piece_chars):
    check_pieces(parts, piece_chars, gpt2)


def check_pieces(parts, piece_chars, tokenizer):
    text = "".join(parts)
    pieces = list(cut_pieces(parts, tokenizer.cut, piece_chars))
    assert "".join(pieces) == text
    assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(text)


@settings(max_examples=500)
@given(st.text(alphabet="ab 1'\n\r\t.,!_。ア苹\u3099\u0301é\x1c\xa0\u2028s", max_size=30))
def test_a_cut_falls_between_the_matches_of_both_patterns_whatever_follows(text):
    # The patterns by another engine: a vocabulary has too few merges to show every wrong cut.
    for pattern in (tiktoken_ext.openai_public.r50k_pat_str, BPE.to_dict()["pattern"]):
        for cut in BPE.cut.finditer(text):
            left, right = text[: cut.start()], text[cut.start() :]
            assert regex.findall(pattern, left) + regex.findall(pattern, right) == regex.findall(pattern, text)


def test_prose_is_cut_close_to_the_wanted_size():
    pieces = list(cut_pieces([TEXT], BPE.cut, 100))
    assert max(map(len, pieces)) < 130
    assert list(cut_pieces([TEXT[i : i + 350] for i in range(0, len(TEXT), 350)], BPE.cut, 100)) == pieces
    chinese = "苹果发布了新产品，" * 50
    assert max(map(len, cut_pieces([chinese], BPE.cut, 100))) < 115
    assert list(cut_pieces(["a" * 500, "b" * 500], BPE.cut, 100)) == ["a" * 500 + "b" * 500]


def test_documents_are_joined_by_a_blank_line_or_by_end_of_text(gpt2):
    documents = [["one", ""], [], [""], ["tw", "o"]]
    assert "".join(join_documents(documents, "\n\n")) == "one\n\ntwo"
    pieces = cut_pieces(join_documents(documents, None), gpt2.cut)
    ((tokens, n_bytes),) = encode_pieces(pieces, gpt2)
    assert tokens.tolist() == [*gpt2.encode("one"), 50256, *gpt2.encode("two")]
    assert n_bytes == 6


@pytest.mark.parametrize("tokenizer", [CharTokenizer("ab苹"), ByteTokenizer(), BPE], ids=lambda t: t.name)
def test_plain_data_round_trip(tokenizer, tmp_path):
    again = Tokenizer.from_dict(json.loads(json.dumps(tokenizer.to_dict())))
    tokenizer.save(tmp_path / "t.json")
    loaded = Tokenizer.load(tmp_path / "t.json")
    assert type(again) is type(loaded) is type(tokenizer)
    assert again.hash == loaded.hash == tokenizer.hash
    assert len(tokenizer.hash) == 64
    assert again.encode("ab苹ab") == tokenizer.encode("ab苹ab")
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ""] == ["t.json"]


def test_gpt2_holds_its_vocabulary_and_needs_no_file_of_tiktoken(gpt2, monkeypatch):
    stored = json.loads(json.dumps(gpt2.to_dict()))
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: pytest.fail("fetched"))
    again = Tokenizer.from_dict(stored)
    assert (again.name, again.vocab_size, again.end_of_text, again.hash) == ("gpt2", 50257, 50256, gpt2.hash)
    assert again.encode("Hello world <|endoftext|>") == gpt2.encode("Hello world <|endoftext|>")


def test_the_hash_tells_vocabularies_apart():
    assert CharTokenizer("ab").hash != CharTokenizer("ba").hash


def test_byte_counts_agree_with_the_bytes_of_each_token():
    for tokenizer in (CharTokenizer("aé苹😀"), ByteTokenizer(), BPE):
        sizes = tokenizer.token_n_bytes()
        assert sizes.dtype == np.int64
        assert sizes.tolist() == [len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)]
    assert CharTokenizer("aé苹😀").token_n_bytes().tolist() == [1, 2, 3, 4]
    assert CharTokenizer("aé").n_bytes(torch.tensor([0, 1, 1])) == 5
    assert ByteTokenizer().n_bytes(np.zeros(3_000_000, np.uint16)) == 3_000_000


def test_bytes_that_are_no_utf8_become_replacement_characters():
    assert ByteTokenizer().decode([0xE8, 0x8B, 65]) == "\ufffdA"


@pytest.mark.parametrize("token", [-1, 256, 10**12])
def test_an_id_outside_the_vocabulary_is_named(token):
    with pytest.raises(ValueError, match=f"token id {token} is outside the vocabulary of 256 tokens"):
        ByteTokenizer().decode([65, token])


def test_unseen_characters_are_named_or_skipped():
    tokenizer = CharTokenizer("abc")
    with pytest.raises(ValueError, match=r"never seen 'x', '苹'; --unknown skip"):
        tokenizer.encode("a苹xb")
    assert tokenizer.encode("a苹xb", unknown="skip") == [0, 1]
    assert tokenizer.encode("") == []
    with pytest.raises(ValueError, match="and 16 more"):
        tokenizer.encode("abcdefghijklmnopqrstuvwxyzABC")
    with pytest.raises(ValueError, match="choose from error, skip"):
        tokenizer.encode("a", unknown="drop")


@pytest.mark.parametrize("tokenizer", [ByteTokenizer(), BPE], ids=lambda t: t.name)
def test_lone_surrogates_become_replacement_characters(tokenizer):
    assert tokenizer.decode(tokenizer.encode("a\udc80b")) == "a\ufffdb"


BYTES = [base64.b64encode(bytes([byte])).decode() for byte in range(256)]
PATTERN = BPE.to_dict()["pattern"]


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        [],
        "char",
        {},
        {"name": 3},
        {"name": ["char"]},
        {"name": "word"},
        {"name": "char"},
        {"name": "char", "characters": ""},
        {"name": "char", "characters": "aa"},
        {"name": "char", "characters": 5},
        {"name": "byte", "more": 1},
        {"name": "bpe"},
        {"name": "bpe", "pattern": PATTERN, "tokens": None},
        {"name": "bpe", "pattern": PATTERN, "tokens": []},
        {"name": "bpe", "pattern": PATTERN, "tokens": [1, 2]},
        {"name": "bpe", "pattern": PATTERN, "tokens": BYTES[1:]},
        {"name": "bpe", "pattern": PATTERN, "tokens": [*BYTES, BYTES[0]]},
        {"name": "bpe", "pattern": PATTERN, "tokens": [*BYTES, ""]},
        {"name": "bpe", "pattern": PATTERN, "tokens": [*BYTES, "no base64!"]},
        {"name": "bpe", "pattern": PATTERN, "tokens": [*BYTES, "é"]},
        {"name": "bpe", "pattern": "(", "tokens": BYTES},
        {"name": "bpe", "pattern": 7, "tokens": BYTES},
        {1: 2, "name": "byte"},
    ],
)
def test_damaged_data_is_refused_in_one_line(damaged):
    with pytest.raises(ValueError, match="damaged") as refused:
        Tokenizer.from_dict(damaged)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"name": "char"}', "[" * 100_000, "\x00"])
def test_a_damaged_file_is_named(content, tmp_path):
    (tmp_path / "t.json").write_text(content)
    with pytest.raises(ValueError, match=r"cannot read the tokenizer .*t\.json"):
        Tokenizer.load(tmp_path / "t.json")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"cannot read the tokenizer .*absent\.json"):
        Tokenizer.load(tmp_path / "absent.json")


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
    CharTokenizer("ab").save(tmp_path / "t.json")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        CharTokenizer("xyz").save(tmp_path / "t.json")
    assert Tokenizer.load(tmp_path / "t.json").vocab_size == 2
    assert [path.name for path in tmp_path.glob("t.json*")] == ["t.json"]


def test_training_by_configuration(gpt2, monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda _: gpt2._encoding)
    sizes = {
        kind: train_tokenizer(DataConfig(tokenizer=kind, bpe_vocab_size=300), lambda: iter([TEXT, TEXT])).vocab_size
        for kind in ("char", "byte", "bpe", "gpt2")
    }
    assert sizes == {"char": len(set(TEXT)), "byte": 256, "bpe": 300, "gpt2": 50257}


def test_no_network_and_no_vocabulary_names_the_way_out(tmp_path):
    nowhere = dict.fromkeys(
        ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy"), "http://127.0.0.1:9"
    )
    code = """
from data.tokenizer import Gpt2Tokenizer
try:
    Gpt2Tokenizer.fetch()
except ValueError as error:
    print(error)
"""
    env = os.environ | nowhere | {"TIKTOKEN_CACHE_DIR": str(tmp_path), "no_proxy": "", "NO_PROXY": ""}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert len(ran.stdout.splitlines()) == 1
    assert "TIKTOKEN_CACHE_DIR" in ran.stdout
    assert "choose --data.tokenizer bpe" in ran.stdout
