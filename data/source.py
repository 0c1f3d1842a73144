"""What every source of text offers."""

from collections.abc import Iterable, Iterator


class Source:
    """A named text that can be read again and again in bounded memory."""

    name: str
    n_bytes: int
    """About how much text there is, for progress bars."""

    def fingerprint(self) -> str:
        """A hash that changes when the text does."""
        raise NotImplementedError

    def documents(self) -> Iterator[Iterable[str]]:
        """The documents in order, each as parts of text that follow each other without a gap."""
        raise NotImplementedError


def clean(text: str) -> str:
    """A whole document under the newline policy of `data.sources`; lone surrogates, which no file can hold, go too."""
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
