import subprocess
import sys

import pytest

from data.config import DataConfig


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": " "}, "data.source is empty"),
        ({"tokenizer": "word"}, "data.tokenizer is 'word'; choose from char, byte, bpe, gpt2"),
        ({"order": "shuffled"}, "data.order is 'shuffled'; choose from random, sequential"),
        (
            {"bpe_vocab_size": 2**31},
            "data.bpe_vocab_size is 2147483648; it must be at least 257 (256 bytes and one merge) and below 2^31",
        ),
        ({"bpe_vocab_size": 256}, "data.bpe_vocab_size is 256; it must be at least 257"),
        ({"val_fraction": 0.0}, "data.val_fraction is 0.0; it must lie between 0 and 1"),
        ({"val_fraction": 1.0}, "data.val_fraction is 1.0"),
        ({"val_fraction": float("nan")}, "data.val_fraction is nan"),
    ],
)
def test_values_out_of_range_are_refused_in_one_line(options, message):
    with pytest.raises(ValueError) as refused:
        DataConfig(**options)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_config_imports_nothing_heavy():
    code = "import sys, data.config; print(*({'torch', 'numpy', 'datasets', 'tiktoken'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_only_a_table_source_imports_datasets():
    code = "import sys, data.prepare, data.loader; print('datasets' in sys.modules, 'pyarrow' in sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.split() == ["False", "False"]
