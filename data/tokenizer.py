"""Text to token ids and back. A tokenizer is plain data (`to_dict`), so it can live inside a checkpoint."""

import base64
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import rustbpe
import tiktoken

from data.config import DataConfig

Unknown = Literal["error", "skip"]
Array = np.ndarray[Any, Any]

# Places where a tiktoken pattern (GPT-2's and rustbpe's) always ends a token, whatever follows: a text cut only there
# gives the tokens of the whole text. Narrower than need be, so that no difference between Python's and Rust's Unicode
# tables matters; the second half is for scripts that are written without spaces.
TOKEN_END = re.compile(
    r"(?<=\S)(?= )|"
    r"(?<=[A-Za-z0-9\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff])(?=[\n,.;:!?\u3001\u3002\uff0c\uff1b\uff1a\uff01\uff1f])"
)
BPE_TRAINING_PIECES = 1024  # of a quarter of a megabyte: more text hardly changes the merges


class Tokenizer:
    """What all tokenizers share. Subclasses give `encode_array` and `to_dict`."""

    name: ClassVar[str]
    cut: ClassVar[re.Pattern[str]] = re.compile("")
    """Matches where a text may be cut without changing its tokens; here, anywhere."""
    end_of_text: int | None = None
    """The token between two documents, or None. It is never made from text."""

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._tokens = list(tokens)

    @property
    def vocab_size(self) -> int:
        return len(self._tokens)

    def encode_array(self, text: str, unknown: Unknown = "error") -> Array:
        """The token ids of `text` as an integer array (n_tokens,). Errors as in `encode`."""
        raise NotImplementedError

    def encode(self, text: str, unknown: Unknown = "error") -> list[int]:
        """The token ids of `text`. ValueError names characters outside the vocabulary, unless `unknown` is 'skip'."""
        if unknown not in ("error", "skip"):
            raise ValueError(f"unknown is {unknown!r}; choose from error, skip")
        return self.encode_array(text, unknown).tolist()

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for. ValueError for an id outside the vocabulary."""
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"token id {token} is outside the vocabulary of {self.vocab_size} tokens")
        return self._tokens[token]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD. ValueError for an id outside the vocabulary."""
        return b"".join(self.token_bytes(int(token)) for token in ids).decode("utf-8", "replace")

    def token_n_bytes(self) -> Array:
        """(vocab_size,) int64: how many bytes of text each token stands for. The end of text stands for none."""
        sizes = np.array([len(token) for token in self._tokens], dtype=np.int64)
        if self.end_of_text is not None:
            sizes[self.end_of_text] = 0
        return sizes

    def n_bytes(self, tokens: Any) -> int:
        """Bytes of text behind a 1-D array of ids, for bits per byte. Bounded memory, also for a memory map."""
        sizes, step = self.token_n_bytes(), 1 << 20
        return sum(int(sizes[np.asarray(tokens[i : i + step])].sum()) for i in range(0, len(tokens), step))

    def to_dict(self) -> dict[str, Any]:
        """All that `from_dict` needs, as plain JSON types."""
        return {"name": self.name}

    @staticmethod
    def from_dict(d: Any) -> "Tokenizer":
        """The inverse of `to_dict`. ValueError says what is wrong with damaged data."""
        kinds = {kind.name: kind for kind in (CharTokenizer, ByteTokenizer, BpeTokenizer, Gpt2Tokenizer)}
        name = d.get("name") if isinstance(d, dict) else None
        if not isinstance(name, str) or name not in kinds:
            raise ValueError(f"damaged tokenizer: its name is {name!r}; known are {', '.join(kinds)}")
        try:
            return kinds[name](**{key: value for key, value in d.items() if key != "name"})
        except (TypeError, ValueError) as error:
            raise ValueError(f"damaged {name} tokenizer: {error}") from None

    @property
    def hash(self) -> str:
        """SHA-256 (hexadecimal) of the canonical JSON of `to_dict`."""
        canonical = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write as JSON: complete, or not at all."""
        beside = Path(f"{os.fspath(path)}.{secrets.token_hex(4)}.tmp")
        try:
            beside.write_text(json.dumps(self.to_dict()), encoding="utf-8")
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> "Tokenizer":
        """Read what `save` wrote. ValueError names the file when it is missing or damaged."""
        try:
            return Tokenizer.from_dict(json.loads(Path(path).read_text(encoding="utf-8")))
        except (OSError, ValueError, RecursionError) as error:
            raise ValueError(f"cannot read the tokenizer {os.fspath(path)}: {error}") from None


class CharTokenizer(Tokenizer):
    """One token for each character; the vocabulary is the characters of the corpus, in code point order."""

    name = "char"

    def __init__(self, characters: str) -> None:
        if not isinstance(characters, str) or not characters:
            raise ValueError("its characters are missing")
        if len(set(characters)) != len(characters):
            raise ValueError("its characters are not distinct")
        super().__init__([character.encode("utf-8", "surrogatepass") for character in characters])
        self.characters = characters
        self._ids = np.full(0x110000, -1, dtype=np.int32)
        self._ids[code_points(characters)] = np.arange(len(characters))

    def encode_array(self, text: str, unknown: Unknown = "error") -> Array:
        ids = self._ids[code_points(text)]
        known = ids >= 0
        if known.all():
            return ids
        if unknown == "error":
            unseen = sorted(set(text) - set(self.characters))
            shown = ", ".join(map(repr, unseen[:10])) + (f" and {len(unseen) - 10} more" if len(unseen) > 10 else "")
            raise ValueError(f"this tokenizer has never seen {shown}; --unknown skip leaves such characters out")
        return ids[known]

    def to_dict(self) -> dict[str, Any]:
        return {"name": self.name, "characters": self.characters}


class ByteTokenizer(Tokenizer):
    """One token for each byte of the text in UTF-8."""

    name = "byte"

    def __init__(self) -> None:
        super().__init__([bytes([byte]) for byte in range(256)])

    def encode_array(self, text: str, unknown: Unknown = "error") -> Array:  # noqa: ARG002 (nothing is unknown)
        return np.frombuffer(without_surrogates(text).encode(), dtype=np.uint8)


class BpeTokenizer(Tokenizer):
    """Byte pairs learnt from the corpus (Sennrich et al. 2016) by rustbpe, merged by tiktoken. Every text has tokens,
    and text never becomes a special token."""

    name = "bpe"
    cut = TOKEN_END
    special_tokens: ClassVar[tuple[str, ...]] = ()  # the end of a text; they follow the learnt tokens

    def __init__(self, pattern: str, tokens: list[str]) -> None:
        """`tokens` are base64, in the order of their ids, which is the order of merging."""
        if not isinstance(pattern, str) or not isinstance(tokens, list) or not all(isinstance(t, str) for t in tokens):
            raise ValueError("its pattern or its tokens are missing")
        ranks = {base64.b64decode(token, validate=True): rank for rank, token in enumerate(tokens)}
        if len(ranks) != len(tokens) or b"" in ranks or not all(bytes([byte]) in ranks for byte in range(256)):
            raise ValueError("its tokens are not distinct, or lack some of the 256 bytes")
        special = {text: len(tokens) + i for i, text in enumerate(self.special_tokens)}
        super().__init__([*ranks, *(text.encode() for text in special)])
        self._encoding = tiktoken.Encoding(self.name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)
        self.end_of_text = len(tokens) if special else None
        self._state = {"name": self.name, "pattern": pattern, "tokens": tokens}

    def encode_array(self, text: str, unknown: Unknown = "error") -> Array:  # noqa: ARG002 (nothing is unknown)
        return self._encoding.encode_to_numpy(without_surrogates(text), disallowed_special=())

    @classmethod
    def train(cls, texts: Iterable[str], vocab_size: int) -> "BpeTokenizer":
        """Learn up to `vocab_size` tokens; fewer where the texts hold no more pairs to merge."""
        if vocab_size < 257:  # rustbpe would panic
            raise ValueError(f"bpe needs a vocabulary of at least 257 tokens, not {vocab_size}")
        trainer = rustbpe.Tokenizer()
        trainer.train_from_iterator(map(without_surrogates, texts), vocab_size, buffer_size=16)  # texts held at once
        ranked = sorted(trainer.get_mergeable_ranks(), key=lambda pair: pair[1])
        return cls(trainer.get_pattern(), [base64.b64encode(bytes(token)).decode() for token, _ in ranked])

    def to_dict(self) -> dict[str, Any]:
        return dict(self._state)


class Gpt2Tokenizer(BpeTokenizer):
    """GPT-2's 50,257 tokens (Radford et al. 2019). Like any other it holds its vocabulary: only training fetches it."""

    name = "gpt2"
    special_tokens = ("<|endoftext|>",)

    @classmethod
    def fetch(cls) -> "Gpt2Tokenizer":
        """From tiktoken, which needs the network once. ValueError names the way out."""
        try:
            encoding = tiktoken.get_encoding("gpt2")
        except (OSError, ValueError, AssertionError) as error:
            raise ValueError(
                f"cannot fetch GPT-2's vocabulary ({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a folder where "
                "tiktoken has stored it, or choose --data.tokenizer bpe"
            ) from None
        tokens = [encoding.decode_single_token_bytes(token) for token in range(encoding.eot_token)]
        return cls(encoding._pat_str, [base64.b64encode(token).decode() for token in tokens])


def train_tokenizer(config: DataConfig, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """The tokenizer that `config` asks for; `texts()` starts a pass over the corpus, for those that learn from it."""
    if config.tokenizer == "char":
        characters: set[str] = set()
        for text in texts():
            characters.update(text)
        if not characters:
            raise ValueError(f"{config.source} holds no text")
        return CharTokenizer("".join(sorted(characters)))
    if config.tokenizer == "bpe":
        return BpeTokenizer.train(islice(texts(), BPE_TRAINING_PIECES), config.bpe_vocab_size)
    return ByteTokenizer() if config.tokenizer == "byte" else Gpt2Tokenizer.fetch()


def n_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def code_points(text: str) -> Array:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.uint32)


def without_surrogates(text: str) -> str:
    """Lone surrogates, which no UTF-8 can hold, become U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
