"""The learning rate against values worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.config import OptimizerConfig
from training.optimizer import learning_rate


def rates(steps, max_steps=12, **options):
    config = OptimizerConfig(**{"learning_rate": 2.0, "warmup_steps": 4} | options)
    return [learning_rate(step, max_steps, config) for step in steps]


@pytest.mark.parametrize("schedule", ["cosine", "linear", "constant"])
def test_warm_up_rises_in_equal_parts_to_the_peak(schedule):
    assert rates([1, 2, 3, 4], schedule=schedule) == [0.5, 1.0, 1.5, 2.0]


@pytest.mark.parametrize(
    ("options", "step", "expected"),
    [
        # 8 steps of decay: a quarter, a half, all of it
        ({"schedule": "cosine"}, 6, 1 + math.sqrt(0.5)),
        ({"schedule": "cosine"}, 8, 1.0),
        ({"schedule": "cosine"}, 12, 0.0),
        ({"schedule": "linear"}, 6, 1.5),
        ({"schedule": "linear"}, 8, 1.0),
        ({"schedule": "linear"}, 11, 0.25),
        ({"schedule": "linear"}, 12, 0.0),
        ({"schedule": "constant"}, 12, 2.0),
        ({"schedule": "cosine", "final_fraction": 0.1}, 8, 1.1),
        ({"schedule": "cosine", "final_fraction": 0.1}, 12, 0.2),
        ({"schedule": "linear", "final_fraction": 0.5}, 10, 1.25),
        # a plateau of 6, then 2 steps down
        ({"schedule": "linear", "decay_fraction": 0.25}, 5, 2.0),
        ({"schedule": "linear", "decay_fraction": 0.25}, 10, 2.0),
        ({"schedule": "linear", "decay_fraction": 0.25}, 11, 1.0),
        ({"schedule": "linear", "decay_fraction": 0.25}, 12, 0.0),
        ({"schedule": "linear", "warmup_steps": 0}, 3, 1.5),
        ({"schedule": "linear", "warmup_steps": 0}, 12, 0.0),
        ({"schedule": "cosine", "warmup_steps": 24}, 12, 1.0),  # the run ends within its warm-up
    ],
)
def test_values_by_hand(options, step, expected):
    assert rates([step], **options) == [pytest.approx(expected, abs=1e-12)]


@given(
    schedule=st.sampled_from(["cosine", "linear", "constant"]),
    max_steps=st.integers(1, 60),
    warmup=st.integers(0, 70),
    decay=st.floats(0.01, 1),
    final=st.floats(0, 1),
)
def test_the_rate_rises_stays_and_falls(schedule, max_steps, warmup, decay, final):
    got = rates(
        range(1, max_steps + 1),
        max_steps,
        schedule=schedule,
        warmup_steps=warmup,
        decay_fraction=decay,
        final_fraction=final,
    )
    top = min(warmup, max_steps)
    assert got[:top] == sorted(got[:top])
    assert got[top:] == sorted(got[top:], reverse=True)
    assert all(0 <= rate <= 2.0 * (1 + 1e-12) for rate in got)
    if schedule != "constant" and max_steps > warmup:
        assert got[-1] == pytest.approx(2.0 * final, abs=1e-12)
