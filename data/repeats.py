"""Text in which looking back pays: Python's documentation, and between its pieces random characters that come again."""

import hashlib
import string
from collections.abc import Iterable, Iterator
from random import Random

from data.pydocs import pydocs_fingerprint, read_pydocs
from data.source import Source

LAYOUT = 3  # of the text below; another number tells caches that the text has changed
ALPHABET = string.ascii_letters + string.digits + string.punctuation
PIECE_CHARACTERS = 128
PERIODS = range(4, 17)  # lengths of the random sequences: with one length, a fixed distance would find the copy
N_COPIES = 4
N_SEQUENCES = 4  # after each piece of text


class RepeatsSource(Source):
    """Each document is a piece of text, then random sequences, each several times. The same on every machine
    with this version of Python; only ASCII, so that a character tokenizer has few tokens."""

    name = "repeats"
    n_bytes = 4_900_000

    def fingerprint(self) -> str:
        return hashlib.sha256(f"repeats {LAYOUT} {pydocs_fingerprint()}".encode()).hexdigest()

    def documents(self) -> Iterator[Iterable[str]]:
        random = Random(0)
        for text in read_pydocs():
            ascii_text = text.encode("ascii", "ignore").decode()
            for start in range(0, len(ascii_text), PIECE_CHARACTERS):
                sequences = (repeated(random) for _ in range(N_SEQUENCES))
                yield (ascii_text[start : start + PIECE_CHARACTERS], *(f"\n{copies}" for copies in sequences))


def repeated(random: Random) -> str:
    """Some random characters, and the same again and again."""
    return N_COPIES * "".join(random.choices(ALPHABET, k=random.choice(PERIODS)))
