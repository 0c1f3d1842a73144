"""Token labels that can be read: visible marks for blanks, bytes for parts of characters, never an empty box."""

import unicodedata
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from typing import Any

from rich.cells import cell_len, set_cell_size

MARKS = {" ": "␣", "\n": "⏎", "\t": "⇥"}
_PREFERRED_FONTS = ("DejaVu Sans", "Noto Sans CJK SC", "WenQuanYi Zen Hei", "PingFang SC", "Microsoft YaHei")
# Fonts of boxes, and bitmap fonts that matplotlib cannot draw.
_UNUSABLE_FONTS = ("LastResort", "Last Resort", "Emoji", "Blank", "Symbols")


def label(token_bytes: bytes, token_id: int | None = None) -> str:
    """One token as printable text: `␣` for a space, `⏎` newline, `⇥` tab, `U+0000` for what has no shape of its own,
    `<E8 8B>` for bytes that are a part of a character. A token without bytes shows its id as `#12`."""
    if not token_bytes:
        return "#?" if token_id is None else f"#{token_id}"
    parts = []
    while token_bytes:
        try:
            text, stray, rest = token_bytes.decode("utf-8"), b"", b""
        except UnicodeDecodeError as error:
            text = token_bytes[: error.start].decode("utf-8")
            stray, rest = token_bytes[error.start :], b""
            # The stray bytes end where something decodes again.
            for end in range(1, len(stray)):
                if _is_character_start(stray[end:]):
                    stray, rest = stray[:end], stray[end:]
                    break
        parts.append("".join(_visible(character, i) for i, character in enumerate(text)))
        if stray:
            parts.append(f"<{stray.hex(' ').upper()}>")
        token_bytes = rest
    return "".join(parts)


def labels(token_bytes: Sequence[bytes], token_ids: Sequence[int]) -> list[str]:
    """The labels of a whole text."""
    return [label(part, token_id) for part, token_id in zip(token_bytes, token_ids, strict=True)]


def distinct(names: Sequence[str]) -> list[str]:
    """The same labels; those that occur more than once get their position as a subscript: `e₃`, `e₁₂`."""
    counts = Counter(names)
    digits = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
    return [f"{name}{str(i).translate(digits)}" if counts[name] > 1 else name for i, name in enumerate(names)]


def escape_missing(text: str, drawable: Collection[int]) -> str:
    """Characters whose code points are not in `drawable` become `U+82F9`."""
    return "".join(c if ord(c) in drawable else code_point(c) for c in text)


def escape_unencodable(text: str, encoding: str) -> str:
    """Characters that a terminal of this encoding cannot take become `U+82F9`."""
    try:
        text.encode(encoding)
        return text
    except UnicodeEncodeError:
        return "".join(c if c.encode(encoding, "ignore") else code_point(c) for c in text)


def code_point(character: str) -> str:
    """`U+82F9`"""
    return f"U+{ord(character):04X}"


def fit(text: str, n_cells: int, mark: str = "…") -> str:
    """Exactly n_cells terminal columns: wide characters count two; a longer text is cut and ends in `mark`."""
    if cell_len(text) <= n_cells:
        return text + " " * (n_cells - cell_len(text))
    return set_cell_size(text, n_cells - 1) + mark if n_cells > 0 else ""


def fonts_for(texts: Iterable[str]) -> tuple[list[str], set[int]]:
    """Installed fonts that together draw `texts`, best first, and the code points that they have.

    Decided by the character maps of the font files themselves; what no font has is missing from the set. matplotlib
    takes such a list as fallbacks, glyph by glyph.
    """
    needed = {ord(c) for text in texts for c in text}
    families: list[str] = []
    covered: set[int] = set()
    for family, file in _installed_fonts():
        if families and needed <= covered:
            break
        has = _charmap(file) & needed
        if not families or has - covered:
            families.append(family)
            covered |= has
    return families, covered


@lru_cache(maxsize=1)
def _installed_fonts() -> tuple[tuple[str, str], ...]:
    """(family, file) of upright regular fonts: matplotlib's own DejaVu Sans first, then well-known ones, then all."""
    from matplotlib import font_manager

    files: dict[str, str] = {"DejaVu Sans": font_manager.findfont("DejaVu Sans")}
    for entry in font_manager.fontManager.ttflist:
        is_regular = entry.style == "normal" and entry.weight in (400, "normal", "regular")
        if is_regular and not any(word in entry.name for word in _UNUSABLE_FONTS):
            files.setdefault(entry.name, entry.fname)

    def rank(family: str) -> tuple[int, str]:
        return (_PREFERRED_FONTS.index(family) if family in _PREFERRED_FONTS else len(_PREFERRED_FONTS), family)

    return tuple((family, files[family]) for family in sorted(files, key=rank))


@lru_cache(maxsize=64)
def _charmap(file: str) -> frozenset[int]:
    """Code points that a font file has a glyph for; empty when it cannot be read."""
    from matplotlib import font_manager

    try:
        font: Any = font_manager.get_font(file)
        return frozenset(font.get_charmap())
    except (OSError, RuntimeError):
        return frozenset()


def _visible(character: str, place: int) -> str:
    if character in MARKS:
        return MARKS[character]
    category = unicodedata.category(character)
    # Cc, Cf, Cs, Co, Cn: controls, invisible formats, unassigned; Z: blanks. A mark (M) at the start has nothing to
    # sit on and would climb onto its neighbour.
    shapeless = category[0] in "CZ" or (category[0] == "M" and place == 0)
    return code_point(character) if shapeless else character


def _is_character_start(part: bytes) -> bool:
    """Does a whole character stand at the start of these bytes?"""
    for n in range(1, min(4, len(part)) + 1):
        try:
            part[:n].decode("utf-8")
            return True
        except UnicodeDecodeError:
            continue
    return False
