"""The interceptors of a thread stay alive while PyTorch holds them."""

import ctypes
import sys

import pytest
import torch

from foci.runtime import interception


class Interceptor:
    is_open = True

    def intercept(self, function, args, kwargs):
        return function(*args, **kwargs)


@pytest.mark.parametrize("takes_reference", [True, False], ids=["counts", "does not count"])
def test_held_interceptors_are_counted(monkeypatch: pytest.MonkeyPatch, takes_reference: bool) -> None:
    """Older versions of PyTorch store the object without taking a reference."""
    stash = torch._C._stash_obj_in_tls
    takes_by_itself = counts_references(stash)

    def stash_as_asked(name: str, value: object) -> None:
        stash(name, value)
        if takes_by_itself and not takes_reference:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(value))

    monkeypatch.setattr(torch._C, "_stash_obj_in_tls", stash_as_asked)
    held = (Interceptor(),)
    before = sys.getrefcount(held)
    interception.set_interceptors(held)
    try:
        assert sys.getrefcount(held) == before + 1
        assert interception.get_interceptors() is held
    finally:
        interception.set_interceptors(())
    assert sys.getrefcount(held) == before


def counts_references(stash) -> bool:
    value = [None]
    before = sys.getrefcount(value)
    stash("foci.test", value)
    counted = sys.getrefcount(value) > before
    if not counted:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    return counted


class Double(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def test_autograd_functions_run_inside_of_vmap() -> None:
    """As transformers builds some masks."""
    with interception.add_interceptor(Interceptor()):
        out = torch.vmap(Double.apply)(torch.ones(3))
    assert out.tolist() == [2.0, 2.0, 2.0]
