"""What the data part can be told. Imports nothing heavy, so that --help stays quick."""

from dataclasses import dataclass
from typing import Literal, get_args

TokenizerName = Literal["char", "byte", "bpe", "gpt2"]
Order = Literal["random", "sequential"]


@dataclass(frozen=True)
class DataConfig:
    """Which text to train on, and how it becomes tokens and batches."""

    source: str = "pydocs"
    """pydocs (Python's own documentation, always there), repeats (the same, with random characters that repeat
    between its pieces), a file, a folder, a glob such as 'books/*.txt', a preset (shakespeare, tinystories,
    openwebtext, fineweb-edu), or the id owner/name of a Hugging Face data set. Files may be text, or json,
    csv and parquet with a column of texts. Write ./pydocs for a folder of that name."""
    split: str = "train"
    """Split of a Hugging Face data set; files and pydocs have only train."""
    column: str = "text"
    """Column with the text in a Hugging Face data set or in json, csv and parquet files."""
    subset: str = ""
    """Configuration of a Hugging Face data set; empty for its default."""
    encoding: str = "utf-8"
    """Encoding of text files. A byte-order mark is removed, and every line ending becomes a newline."""
    tokenizer: TokenizerName = "bpe"
    """char (characters of the corpus), byte, bpe (trained on the corpus), or gpt2 (GPT-2's vocabulary)."""
    bpe_vocab_size: int = 1024
    """Vocabulary to train for bpe, its 256 bytes included. A small corpus may yield fewer tokens."""
    val_fraction: float = 0.1
    """Part at the end of the corpus that is kept for validation."""
    order: Order = "random"
    """random: windows drawn uniformly. sequential: the corpus in order, every token a target once per epoch."""
    cache_dir: str = ""
    """Folder for prepared tokens; empty for $GLASSGPT_CACHE, or else glassgpt in the user's cache folder."""

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ValueError("data.source is empty: give pydocs, a file, a folder, a glob, a preset or owner/name")
        for name, value, choices in (
            ("tokenizer", self.tokenizer, get_args(TokenizerName)),
            ("order", self.order, get_args(Order)),
        ):
            if value not in choices:
                raise ValueError(f"data.{name} is {value!r}; choose from {', '.join(choices)}")
        if not 257 <= self.bpe_vocab_size < 2**31:
            raise ValueError(
                f"data.bpe_vocab_size is {self.bpe_vocab_size}; it must be at least 257 (256 bytes and one merge) and "
                "below 2^31"
            )
        if not 0 < self.val_fraction < 1:
            raise ValueError(f"data.val_fraction is {self.val_fraction}; it must lie between 0 and 1, both excluded")
