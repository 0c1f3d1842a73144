"""Peak memory of forward and backward, as the system counts it, in a process of its own: no n×n map is ever there."""

from pathlib import Path

import pytest

from benchmarks.attention import Benchmark, measure
from benchmarks.process import in_own_process

N, D, FLOAT = 8192, 64, 4
MAP = N * N * FLOAT  # 268 MB
BLOCK, WINDOW, CHUNK = 256, 256, 64  # the defaults
ALLOCATOR = 8_000_000  # bytes that the allocator holds back, and code that is loaded at its first use

# Bytes beyond q, k, v and the gradient that comes in. Counted, then rounded up by about half:
BOUNDS = {
    # out, dq, dk, dv and the product that sums to delta: 5·n·D. A few tiles at once.
    "tiled": (8 * N * D + 16 * BLOCK**2) * FLOAT + ALLOCATOR,
    "ring": (10 * N * D + 16 * BLOCK**2) * FLOAT + ALLOCATOR,  # k and v visit as one stack, their gradients too
    # q, out and their gradients in blocks: 4·n·D; k and v twice each and their gradients, as views are put together
    # and taken apart: 12·n·D. One mask for all blocks, and tiles of the kernel.
    "window": (24 * N * D + 16 * WINDOW * 2 * WINDOW) * FLOAT + ALLOCATOR,
    # q, k, v as features and padded, out and all their gradients: about 16·n·D; the explicit form within chunks:
    # n·C each; a state for each chunk: n/C·D².
    "linear": N * (24 * D + 8 * CHUNK + 8 * D * D // CHUNK) * FLOAT + ALLOCATOR,
}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="this system does not tell a process's peak memory")
@pytest.mark.parametrize("name", BOUNDS)
def test_peak_memory_is_linear_in_n(name):
    """At n = 8,192 a single head stays below its bound, which is below half of one map."""
    options = Benchmark(heads=1, head_dim=D, window=WINDOW, threads=1, repeat_seconds=0)
    _, n_bytes = in_own_process(measure, options, name, N, True)
    assert 4 * N * D < n_bytes <= BOUNDS[name] < MAP / 2, f"{n_bytes:,} bytes, at most {BOUNDS[name]:,}"
