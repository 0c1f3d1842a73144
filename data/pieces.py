"""From documents to tokens, in pieces: bounded memory, all cores, and exactly the tokens of the uncut text."""

import re
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np

from data.tokenizer import Array, Tokenizer, n_cores

PIECE_CHARS = 1 << 18
SEPARATOR = "\n\n"
"""Stands between two documents where the tokenizer has no token for the end of text."""

# The end of a document travels through the pieces as None.
Piece = str | None


def join_documents(documents: Iterable[Iterable[str]], separator: Piece) -> Iterator[Piece]:
    """The parts of all documents in order, with the separator between those that hold text."""
    any_before = False
    for document in documents:
        at_start = True
        for part in filter(None, document):
            if at_start and any_before:
                yield separator
            yield part
            at_start, any_before = False, True


def cut_pieces(parts: Iterable[Piece], cut: re.Pattern[str], piece_chars: int = PIECE_CHARS) -> Iterator[Piece]:
    """The same text in pieces, each ending at the first match of `cut` from `piece_chars` on (or at a None).

    Text in which `cut` never matches stays whole: right tokens come before small memory.
    """
    text, searched = "", 0
    for part in parts:
        if part is None:
            if text:
                yield text
            yield None
            text, searched = "", 0
            continue
        text += part
        start, at = 0, max(piece_chars, searched)
        while at < len(text) and (match := cut.search(text, at)):
            yield text[start : match.start()]
            start = match.start()
            at = start + piece_chars
        searched = len(text) - start if at < len(text) else 0
        if start:
            text = text[start:]
    if text:
        yield text


def encode_pieces(pieces: Iterable[Piece], tokenizer: Tokenizer) -> Iterator[tuple[Array, int]]:
    """Token arrays in order, each with the bytes of text it stands for; a None becomes the end-of-text token.

    A few groups of pieces for each core are in flight while the next are read.
    """
    with ThreadPoolExecutor(n_cores()) as pool:
        pending: deque[Future[tuple[Array, int]]] = deque()
        for group in _groups(pieces):
            pending.append(pool.submit(_encode_group, group, tokenizer))
            if len(pending) > 2 * n_cores():
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


def _groups(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Neighbouring pieces together until they are worth a task: data sets of short rows need it."""
    group: list[Piece] = []
    n_chars = 0
    for piece in pieces:
        group.append(piece)
        n_chars += len(piece or "")
        if n_chars >= PIECE_CHARS:
            yield group
            group, n_chars = [], 0
    if group:
        yield group


def _encode_group(group: list[Piece], tokenizer: Tokenizer) -> tuple[Array, int]:
    end = np.array([tokenizer.end_of_text or 0], dtype=np.uint32)
    arrays = [end if piece is None else tokenizer.encode_array(piece) for piece in group]
    return np.concatenate(arrays), sum(text_n_bytes(piece or "") for piece in group)


def text_n_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
