"""The shared memory that the one pass of additive attention's backward declares by itself, built for real GPUs."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

# A launch has 48 KiB unless the compiler asks for more, which it does by what it knows of: 16 KiB it does not.
MOST = 32 * 1024

BUILD = """
import sys
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from foci.backends import additive_joint
from foci.gpu.additive.launch import Terms

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
name, capability, values = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
with FakeTensorMode():
    def made(*shape, dtype=DTYPES[name]):
        return torch.empty(shape, device="cuda:0", dtype=dtype)

    q, k, v, weight = made(2, 8, 300, 64), made(2, 8, 300, 64), made(2, 8, 300, values), made(64)
    dense, seed = made(2, 8, 300, 300, dtype=torch.uint8), made(1, dtype=torch.int64)
    terms = Terms(None, None, None, dense, seed, False, 0.1)
    tiling = additive_joint.tiling_for(300, q.device)
    found = additive_joint.in_one_pass(q, k, v, weight, terms, tiling, 132, True)
kernel, _, tensors, numbers, options = found.steps[1]
typed = dict.fromkeys(("q", "k", "v", "weight", "d_out", "spans", "query_ids", "key_ids"), "*" + name)
typed |= {"dense": "*u8", "seed": "*i64"}
signature = {argument: typed.get(argument, "*fp32") for argument in kernel.arg_names[: len(tensors)]}
constants = {}
for parameter, number in zip(kernel.params[len(tensors) :], numbers, strict=True):
    if parameter.is_constexpr:
        signature[parameter.name], constants[parameter.name] = "constexpr", number
    else:
        signature[parameter.name] = "fp32" if isinstance(number, float) else "i64" if abs(number) >= 2**31 else "i32"
source = ASTSource(kernel, signature, constants, {(place,): [["tt.divisibility", 16]] for place in range(len(tensors))})
built = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
print(built.metadata.shared, "foci_room" in built.asm["ptx"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("values", [16, 32, 64])
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_room_fits_beside_what_the_compiler_takes(dtype: str, capability: int, values: int) -> None:
    """In float32 there would be none: the room lies in memory there."""
    without = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", BUILD, dtype, str(capability), str(values)]
    done = subprocess.run(command, env=without, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    taken, has_room = done.stdout.split()
    assert (has_room == "True") is (dtype == "bf16")
    assert has_room == "False" or int(taken) <= MOST
