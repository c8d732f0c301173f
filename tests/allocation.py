"""How much memory a computation takes, counted where PyTorch hands out tensors."""

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Records the entries of the largest tensor that was made, and the most bytes that lived at one time.

    >>> with LargestTensor() as seen:
    ...     x = torch.zeros(10) + torch.ones(10, 10)
    >>> seen.largest
    100

    What a fused kernel takes inside itself is not seen. What lives on for a backward is.
    """

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.peak = 0
        self._living: dict[int, tuple[StorageWeakRef, int]] = {}
        self._bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage().data_ptr() for tensor in tree_leaves((args, kwargs)) if is_tensor(tensor)}
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in given:
                self._saw(tensor)
        return found

    def _saw(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.largest = max(self.largest, storage.nbytes() // tensor.element_size())
        self._living[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self._bytes += storage.nbytes()
        if self._bytes > self.peak:
            # The sum only grows until somebody looks which of them still live.
            self._living = {place: entry for place, entry in self._living.items() if not entry[0].expired()}
            self._bytes = sum(size for _, size in self._living.values())
            self.peak = max(self.peak, self._bytes)


def is_tensor(thing: Any) -> bool:
    return isinstance(thing, torch.Tensor)
