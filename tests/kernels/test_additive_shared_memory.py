"""Shared memory that the one-pass backward of additive attention declares itself, compiled for real GPU targets."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# A launch has 48 KiB unless the compiler requests more, and it does not know of the 16 KiB that the kernel declares.
MAX_COMPILER_BYTES = 32 * 1024

BUILD = """
import sys
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from foci.gpu.additive import one_pass_backward
from foci.gpu.additive.arguments import AdditiveOptions

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
name, capability, values = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with FakeTensorMode():
    def made(*shape, dtype=DTYPES[name]):
        return torch.empty(shape, device="cuda:0", dtype=dtype)

    q, k, v, weight = made(2, 8, 300, 64), made(2, 8, 300, 64), made(2, 8, 300, values), made(64)
    dense, seed = made(2, 8, 300, 300, dtype=torch.uint8), made(1, dtype=torch.int64)
    options = AdditiveOptions(None, None, None, dense, seed, False, 0.1)
    tiling = one_pass_backward.choose_one_pass_tiling(300, q.device)
    plan = one_pass_backward.plan_one_pass_backward(q, k, v, weight, options, tiling, 132, True)
kernel, _, tensors, scalars, launch_options = plan.launches[1]
typed = dict.fromkeys(("q", "k", "v", "weight", "d_out", "key_ranges", "query_ids", "key_ids"), "*" + name)
typed |= {"dense": "*u8", "seed": "*i64"}
signature = {argument: typed.get(argument, "*fp32") for argument in kernel.arg_names[: len(tensors)]}
constants = {}
for parameter, number in zip(kernel.params[len(tensors) :], scalars, strict=True):
    if parameter.is_constexpr:
        signature[parameter.name], constants[parameter.name] = "constexpr", number
    else:
        signature[parameter.name] = "fp32" if isinstance(number, float) else "i64" if abs(number) >= 2**31 else "i32"
source = ASTSource(kernel, signature, constants, {(place,): [["tt.divisibility", 16]] for place in range(len(tensors))})
built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch_options)
print(built.metadata.shared, "foci_scratch" in built.asm["ptx"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("values", [16, 32, 64])
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_scratch_fits_next_to_the_compilers_shared_memory(dtype: str, capability: int, values: int) -> None:
    """float32 has no space left in shared memory: its scratch is in global memory."""
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", BUILD, dtype, str(capability), str(values)]
    done = subprocess.run(command, env=without, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    taken, has_scratch = done.stdout.split()
    assert (has_scratch == "True") is (dtype == "bf16")
    assert has_scratch == "False" or int(taken) <= MAX_COMPILER_BYTES
