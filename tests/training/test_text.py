"""TextStream: what is shown while tokens arrive is the text of all of them, cut at the stop text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data.tokenizer import BpeTokenizer, ByteTokenizer, CharTokenizer
from training.text import TextStream, start_tokens

BYTES = ByteTokenizer()
BPE = BpeTokenizer.train(["苹果发布了新产品，他吃了一个苹果。" * 40 + "the naïve façade — the the 👩‍👩‍👧 " * 40], 330)
# Few letters, so that stop texts are found and nearly found; of one, two, three and four bytes.
LETTERS = st.text(st.sampled_from("aabé苹😀\n"), max_size=30)


def stream_all(tokenizer, tokens, stop):
    """The stream, and the pieces that it released: one a token, one for the end."""
    stream = TextStream(tokenizer, stop)
    return stream, [*(stream.feed(token) for token in tokens), stream.end()]


def cut(text, stop):
    found = text.find(stop) if stop else -1
    return text[:found] if found >= 0 else text


@pytest.mark.parametrize("tokenizer", [BYTES, BPE], ids=["byte", "bpe"])
@given(text=st.one_of(st.text(), LETTERS), stop=LETTERS.map(lambda s: s[:3]))
def test_released_text_is_the_text_cut_at_the_stop(tokenizer, text, stop):
    tokens = tokenizer.encode(text)
    stream, pieces = stream_all(tokenizer, tokens, stop)
    expected = cut(text, stop)
    assert "".join(pieces) == stream.text == expected
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in expected
    assert stream.finish == ("stop" if stop and stop in text else "length")


@given(text=LETTERS, data=st.data())
def test_a_stop_from_within_the_text_is_found_wherever_tokens_end(text, data):
    first = data.draw(st.integers(0, len(text)))
    stop = text[first : data.draw(st.integers(first, len(text)))]
    stream, pieces = stream_all(BYTES, BYTES.encode(text), stop)
    assert "".join(pieces) == cut(text, stop)
    assert stop not in "".join(pieces) or stop == ""
    n_used = len(stream.tokens)  # no token after the one that completed the stop
    assert n_used == (len((cut(text, stop) + stop).encode()) if stop else len(text.encode()))


@given(text=LETTERS, stop=LETTERS.map(lambda s: s[:3]))
def test_no_more_is_held_back_than_may_become_the_stop_or_a_character(text, stop):
    stream = TextStream(BYTES, stop)
    for n, token in enumerate(BYTES.encode(text), start=1):
        stream.feed(token)
        if stream.finish:
            return
        arrived = text.encode()[:n].decode("utf-8", "ignore")
        assert arrived.startswith(stream.text)
        assert stop.startswith(arrived[len(stream.text) :])
        assert len(arrived) - len(stream.text) < max(1, len(stop))


@given(data=st.binary(max_size=40), stop=st.sampled_from(["", "a", "\ufffd", "é"]))
def test_bytes_that_are_no_text_become_replacement_characters(data, stop):
    stream, pieces = stream_all(BYTES, list(data), stop)
    assert "".join(pieces) == stream.text == cut(data.decode("utf-8", "replace"), stop)


def test_a_character_appears_when_its_last_byte_does():
    stream = TextStream(BYTES)
    assert [stream.feed(byte) for byte in "é苹".encode()] == ["", "é", "", "", "苹"]


def test_a_false_start_of_the_stop_is_released_at_once_when_it_breaks_off():
    stream = TextStream(BYTES, "aab")
    assert [stream.feed(ord(letter)) for letter in "aaacaab!"] == ["", "", "a", "aac", "", "", "", ""]
    assert (stream.text, stream.finish) == ("aaac", "stop")
    assert stream.end() == ""
    assert stream.feed(ord("x")) == ""
    assert stream.text == "aaac"


def test_the_end_of_text_token_ends_a_sample_and_is_no_part_of_it():
    tokenizer = ByteTokenizer()
    tokenizer.end_of_text = 0
    stream = TextStream(tokenizer, "bc")
    assert [stream.feed(token) for token in (*b"ab", 0, *b"x")] == ["a", "", "b", ""]
    assert (stream.text, stream.finish, stream.tokens) == ("ab", "end_of_text", list(b"ab"))


def test_an_empty_prompt_starts_from_end_of_text_or_a_newline_or_the_first_token():
    tokenizer = ByteTokenizer()
    assert start_tokens(tokenizer) == [10]
    tokenizer.end_of_text = 7
    assert start_tokens(tokenizer) == [7]
    assert start_tokens(CharTokenizer("abc")) == [0]
