"""The Triton kernels of `tiled` against `reference`: in Triton's interpreter, compiled without a GPU, and on a GPU.

The interpreter has to be chosen before Triton is first imported, and would stay for the whole process: so it lives in
a child process, which computes what it is sent. It has no bfloat16 (it multiplies their bits as integers).
"""

import importlib.util
import os
import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch

from model.attention import build
from model.attention.mask import MaskRule

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux"),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]
REPOSITORY = Path(__file__).resolve().parents[3]
TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DOCUMENTS = torch.tensor([[0] * 10 + [1] * 12 + [2] * 18, [7] * 33 + [5] * 7])
# (T, S, heads, groups, head_dim, rule, options)
CASES = {
    "one position": (1, 1, 2, 1, 8, MaskRule(), {}),
    "one less than a block": (15, 15, 2, 2, 8, MaskRule(), {}),
    "63": (63, 63, 1, 1, 8, MaskRule(), {}),
    "65, head_dim 20": (65, 65, 2, 1, 20, MaskRule(), {}),
    "groups": (17, 17, 4, 2, 8, MaskRule(), {}),
    "head_dim 64": (33, 33, 2, 1, 64, MaskRule(), {}),
    "bidirectional": (33, 33, 2, 1, 8, MaskRule(causal=False), {}),
    "last queries": (9, 40, 4, 1, 8, MaskRule(), {}),
    "one query": (1, 33, 2, 1, 8, MaskRule(), {}),
    "window": (40, 40, 2, 1, 8, MaskRule(window=5), {}),
    "window 1": (33, 33, 1, 1, 8, MaskRule(window=1), {}),
    "window, globals": (63, 63, 1, 1, 8, MaskRule(window=6, n_global=18), {}),
    "window, globals, last queries": (20, 50, 1, 1, 8, MaskRule(window=6, n_global=3), {}),
    "bidirectional window, globals": (40, 63, 2, 1, 8, MaskRule(causal=False, window=6, n_global=3), {}),
    "global queries": (63, 63, 1, 1, 8, MaskRule(causal=False, window=6, n_global=18), {}),
    "documents": (40, 40, 2, 1, 8, MaskRule(documents=DOCUMENTS), {}),
    "documents, window, last queries": (20, 40, 2, 1, 8, MaskRule(window=9, n_global=2, documents=DOCUMENTS), {}),
    "scale, softcap, alibi": (17, 20, 4, 2, 8, MaskRule(), {"scale": 0.7, "softcap": 2.0, "alibi": True}),
    "bidirectional alibi": (33, 33, 2, 2, 8, MaskRule(causal=False), {"alibi": True}),
}


def compute(name, q, k, v, pull, rule, options, change=None):
    """out, log-sum-exp, dq, dk, dv. change: what is done to the kernels, by its name in CHANGES."""
    path = build(name, **options)
    if name == "reference":
        return run(path, q, k, v, pull, rule)
    from model.attention import _triton

    path._kernel_devices = ("cpu", "cuda")
    assert path.kernel(q, k, v, rule=rule) == "triton"
    with pytest.MonkeyPatch.context() as patch:
        if not q.is_cuda:  # several blocks in a small input
            patch.setattr(_triton, "block_size", lambda *_: 16)
        if change:
            CHANGES[change](patch, _triton)
        return run(path, q, k, v, pull, rule)


def fill_fresh_memory(patch, _):
    empty, empty_like = torch.empty, torch.empty_like
    patch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan))
    patch.setattr(torch, "empty_like", lambda *args, **kwargs: empty_like(*args, **kwargs).fill_(torch.nan))


def change_task(field, value):
    def change(patch, kernels):
        right = kernels._task

        def wrong(*args):
            task = right(*args)
            kind = type(getattr(task, field))  # int, or Triton's constant
            return task._replace(**{field: kind(value)})

        patch.setattr(kernels, "_task", wrong)

    return change


CHANGES = {
    "fresh memory is NaN": fill_fresh_memory,
    "the future leaks": change_task("causal", False),
    "the window is too wide": change_task("window", 6),
    "a global is missing": change_task("n_global", 2),
    "the scale is wrong": change_task("scale", 0.3),
}


def run(path, q, k, v, pull, rule):
    q, k, v = (x.detach().clone().requires_grad_() for x in (q, k, v))
    out = path(q, k, v, rule=rule)
    lse = path.log_sum_exp(q, k, rule=rule).detach()
    return [out.detach(), lse, *torch.autograd.grad(out, (q, k, v), pull)]


def serve():
    """What the child process does until its input ends."""
    torch.set_num_threads(1)
    results, sys.stdout = sys.stdout.buffer, sys.stderr
    while True:
        try:
            arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            answer = compute("tiled", *arguments)
        except Exception:
            answer = traceback.format_exc()
        pickle.dump(answer, results)
        results.flush()


@pytest.fixture(scope="module")
def interpreter():
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-W", "error::RuntimeWarning", __file__]  # numpy's, about NaN and overflow
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, cwd=REPOSITORY, env=environment) as child:

        def ask(*arguments):
            pickle.dump(arguments, child.stdin)
            child.stdin.flush()
            answer = pickle.load(child.stdout)
            if isinstance(answer, str):
                raise RuntimeError(answer)
            return answer

        yield ask


def draw_inputs(n_queries, n_keys, heads, groups, dim, dtype):
    shapes = (heads, n_queries), (groups, n_keys), (groups, n_keys), (heads, n_queries)
    return [torch.randn(2, n, h, dim).to(dtype).transpose(1, 2) for h, n in shapes]  # as the model has them: views


def check(kernels, case, dtype=torch.float32, **change):
    *sizes, rule, options = case
    inputs = draw_inputs(*sizes, dtype)
    got = kernels(*inputs, rule, options, *change.values())
    wanted = compute("reference", *(x.double() for x in inputs), rule, options)
    assert [x.dtype for x in got] == [dtype, torch.float32, dtype, dtype, dtype]
    for one, other in zip(got, wanted, strict=True):
        assert (one.double() - other).abs().max() <= TOLERANCE[dtype] * max(1, other.abs().max())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_kernels_agree_with_reference(interpreter, case):
    check(interpreter, case)


@pytest.mark.parametrize("name", ["65, head_dim 20", "scale, softcap, alibi"])
def test_half_precision(interpreter, name):
    check(interpreter, CASES[name], torch.float16)


def test_fresh_memory_is_not_read(interpreter):
    check(interpreter, CASES["window, globals, last queries"], change="fresh memory is NaN")


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ("the future leaks", "one less than a block"),
        ("the window is too wide", "window"),
        ("a global is missing", "window, globals, last queries"),
        ("the scale is wrong", "groups"),
    ],
)
def test_a_broken_kernel_is_found(interpreter, change, name):
    with pytest.raises(AssertionError):
        check(interpreter, CASES[name], change=change)


def test_cpu_keeps_the_pytorch_tiles():
    q, k, v, _ = draw_inputs(9, 9, 2, 1, 8, torch.float32)
    path = build("tiled")
    assert path.kernel(q, k, v, rule=MaskRule()) == "pytorch tiles"
    path._kernel_devices = ("cpu",)
    assert path.kernel(q, k, v, rule=MaskRule()) == "triton"
    wide = torch.zeros(1, 2, 9, 129)
    for x in (q.double(), wide, q[:0]):
        assert path.kernel(x, x, x, rule=MaskRule()) == "pytorch tiles"


COMPILE = """
import sys, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import JITFunction, driver
from model.attention import build
from model.attention.mask import MaskRule

class NoGPU:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 80, 32))

def compile_only(kernel, *args, warmup, **kwargs):
    compiled = run(kernel, *args, warmup=True, **kwargs)
    assert compiled.asm["cubin"]
    print(compiled.metadata.shared)

driver.set_active(NoGPU)
run, JITFunction.run = JITFunction.run, compile_only
q, k, v = (torch.zeros(1, n, 32, 128, dtype=getattr(torch, sys.argv[1]), requires_grad=True) for n in (4, 2, 2))
path = build("tiled", softcap=2.0, alibi=True)
path._kernel_devices = ("cpu",)
rule = MaskRule(window=9, n_global=2, documents=torch.zeros(1, 32, dtype=torch.int64))
path(q, k, v, rule=rule).sum().backward()
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_compile_for_a_gpu(dtype, tmp_path):
    """To machine code, and within the fast memory that every GPU since compute capability 8.0 has. Needs no GPU."""
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-c", COMPILE, dtype]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY, env=environment)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == 3
    assert all(int(n_bytes) <= 99 * 1024 for n_bytes in done.stdout.split())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU to run the compiled kernels on")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_compiled_kernels_agree_with_reference(dtype):
    def kernels(*arguments):
        *inputs, rule, options = arguments
        documents = None if rule.documents is None else rule.documents.cuda()
        rule = MaskRule(rule.causal, rule.window, rule.n_global, documents)
        return [x.cpu() for x in compute("tiled", *(x.cuda() for x in inputs), rule, options)]

    for case in CASES.values():
        check(kernels, case, dtype)


if __name__ == "__main__":
    serve()
