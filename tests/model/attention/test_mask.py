"""MaskRule against its definition, one pair at a time."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from model.attention.mask import MaskRule


def may_see(rule, i, j, documents=None):
    if rule.causal and j > i:
        return False
    if documents is not None and documents[i] != documents[j]:
        return False
    return rule.window is None or abs(i - j) < rule.window or i < rule.n_global or j < rule.n_global


@given(
    causal=st.booleans(),
    window=st.none() | st.integers(1, 20),
    n_global=st.integers(0, 6),
    size=st.integers(1, 16),
    data=st.data(),
)
def test_allowed_is_the_definition_for_any_block(causal, window, n_global, size, data):
    ids = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    documents = data.draw(st.none() | st.lists(ids, min_size=2, max_size=2), label="documents")
    block = st.lists(st.integers(0, size - 1), min_size=1, max_size=size)
    rows, columns = data.draw(block, label="rows"), data.draw(block, label="columns")
    rule = MaskRule(causal, window, n_global, None if documents is None else torch.tensor(documents))
    got = rule.allowed(torch.tensor(rows), torch.tensor(columns))
    assert got.dtype == torch.bool
    wanted = [[[may_see(rule, i, j, ids) for j in columns] for i in rows] for ids in documents or [None]]
    assert got.tolist() == (wanted[0] if documents is None else [[matrix] for matrix in wanted])


@given(causal=st.booleans(), window=st.none() | st.integers(1, 20), n_global=st.integers(0, 6), size=st.integers(1, 16))
def test_every_position_sees_itself(causal, window, n_global, size):
    places = torch.arange(size)
    assert MaskRule(causal, window, n_global).allowed(places, places).diagonal().all()


def test_causal_window_of_two_with_one_global():
    places = torch.arange(4)
    got = MaskRule(window=2, n_global=1).allowed(places, places).int().tolist()
    assert got == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]


def test_bidirectional_globals_see_and_are_seen():
    places = torch.arange(4)
    got = MaskRule(causal=False, window=1, n_global=1).allowed(places, places).int().tolist()
    assert got == [[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]]


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (MaskRule(), set()),
        (MaskRule(n_global=3), set()),  # without a window every position is seen anyway
        (MaskRule(causal=False), {"bidirectional"}),
        (MaskRule(window=8), {"window"}),
        (MaskRule(window=8, n_global=1), {"window", "globals"}),
        (MaskRule(documents=torch.zeros(1, 3)), {"documents"}),
    ],
)
def test_words_are_what_the_rule_needs(rule, words):
    assert rule.words() == words


def test_impossible_rules_are_refused():
    for window in (0, 2.5, True):
        with pytest.raises(ValueError, match=f"window is {window}; it must be a whole number from 1"):
            MaskRule(window=window)
    with pytest.raises(ValueError, match="n_global is -1; it must be 0 or more"):
        MaskRule(n_global=-1)


RANGES = st.tuples(st.integers(0, 24), st.integers(1, 9)).map(lambda pair: range(pair[0], pair[0] + pair[1]))


@given(
    causal=st.booleans(),
    window=st.none() | st.integers(1, 12),
    n_global=st.integers(0, 6),
    n_documents=st.integers(0, 3),
    rows=RANGES,
    columns=RANGES,
)
@settings(max_examples=300)
def test_what_is_said_of_a_block_holds_for_its_pairs(causal, window, n_global, n_documents, rows, columns):
    """A block left out holds no pair, a block taken whole holds all; without documents and globals the converse too."""
    documents = torch.arange(2 * 40).view(2, 40) % n_documents if n_documents else None
    rule = MaskRule(causal, window, n_global, documents)
    allowed = rule.allowed(torch.tensor(rows), torch.tensor(columns))
    if not rule.allows_any(rows, columns):
        assert not allowed.any()
    if rule.allows_all(rows, columns):
        assert allowed.all()
    if documents is None and (n_global == 0 or window is None):
        assert rule.allows_any(rows, columns) == bool(allowed.any())
        assert rule.allows_all(rows, columns) == bool(allowed.all())
