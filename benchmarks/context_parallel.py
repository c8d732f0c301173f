"""Context parallel attention: keys and values gathered, as `foci.attention` does, against a ring with `foci.merge`.

Forward without gradients, tokens sharded over the processes. In the ring, each process attends to the keys that it has
while the next ones are on their way, and merges the parts by their log-sum-exp.

Usage: torchrun --nproc-per-node 2 benchmarks/context_parallel.py
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import foci

HEADS, WIDTH, ROUNDS = 8, 64, 7


def attend_gathered(mesh: DeviceMesh, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    spread = (DTensor.from_local(x, mesh, [Shard(2)], run_check=False) for x in (q, k, v))
    out: DTensor = foci.attention(*spread, mask=foci.causal if causal else None)  # type: ignore[assignment]
    return out.to_local()


def attend_in_a_ring(mesh: DeviceMesh, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    rank, size = mesh.get_local_rank(), mesh.size()
    parts = []
    own = torch.stack([k, v])
    for step in range(size):
        owner = (rank - step) % size
        upcoming, requests = torch.empty_like(own), []
        if step + 1 < size:
            send = dist.P2POp(dist.isend, own, (rank + 1) % size)
            requests = dist.batch_isend_irecv([send, dist.P2POp(dist.irecv, upcoming, (rank - 1) % size)])
        if not causal or owner <= rank:
            mask = foci.causal if causal and owner == rank else None
            out, weights = foci.attention(q, own[0], own[1], mask=mask, return_weights=True)
            parts.append((out, weights.lse))
        for request in requests:
            request.wait()
        own = upcoming
    return foci.merge(parts)[0]


def measure(run: Callable[[], Tensor]) -> float:
    """The median time of the slowest process, in milliseconds."""
    times = []
    for _ in range(ROUNDS):
        dist.barrier()
        start = time.perf_counter()
        run()
        taken = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        times.append(float(taken) * 1e3)
    return median(times)


@torch.no_grad()
def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    size, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (size,))
    if rank == 0:
        print("tokens,processes,mask,gathered_ms,ring_ms,gathered_key_MiB,ring_key_MiB")
    for tokens in (1024, 4096):
        q, k, v = torch.randn(3, 1, HEADS, tokens // size, WIDTH)
        for causal in (False, True):
            runs = [partial(run, mesh, q, k, v, causal) for run in (attend_gathered, attend_in_a_ring)]
            torch.testing.assert_close(*(run() for run in runs))
            gathered, ring = (measure(run) for run in runs)
            # All keys and values, against those at hand and those on their way.
            held = [count * 2 * k.nbytes / 2**20 for count in (size, 2)]
            if rank == 0:
                name = "causal" if causal else "none"
                print(f"{tokens},{size},{name},{gathered:.1f},{ring:.1f},{held[0]:.1f},{held[1]:.1f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
