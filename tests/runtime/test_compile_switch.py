"""Whether PyTorch compiles: off inside a block, on for our own programs, never against the setting of the caller."""

from collections.abc import Callable
from threading import Thread

import pytest
import torch
import torch._dynamo
from torch import Tensor

from foci.runtime.compile_switch import COMPILE_SWITCH, disable_compile, enable_compile


@pytest.fixture
def was_compiled() -> Callable[[], bool]:
    """Whether a compiled function is compiled when it is called here."""

    def doubled(x: Tensor) -> tuple[Tensor, bool]:
        return x * 2, torch.compiler.is_compiling()

    program, x = torch.compile(doubled, backend="eager"), torch.ones(2)
    return lambda: program(x)[1]


def stance() -> str:
    return torch._dynamo.eval_frame._stance.stance


def test_blocks_disable_and_compiled_calls_enable_the_compiler(was_compiled: Callable[[], bool]) -> None:
    assert was_compiled()
    with disable_compile():
        assert not was_compiled()
        with enable_compile():
            assert was_compiled()
            with disable_compile():
                assert was_compiled()
            with enable_compile():
                assert was_compiled()
            assert was_compiled()
        assert not was_compiled()
        with disable_compile():
            assert not was_compiled()
        assert not was_compiled()
    assert was_compiled()


def test_a_failing_compiled_call_restores_the_stance() -> None:
    with disable_compile():
        with pytest.raises(ZeroDivisionError), enable_compile():
            _ = 1 // 0
        assert stance() == "force_eager"
    with pytest.raises(ZeroDivisionError), disable_compile():
        _ = 1 // 0
    assert (stance(), COMPILE_SWITCH.blocks, COMPILE_SWITCH.compiled_calls, COMPILE_SWITCH.stance) == (
        "default",
        0,
        0,
        None,
    )


def test_a_block_closes_during_a_compiled_call_on_another_thread() -> None:
    block = disable_compile()
    block.__enter__()
    with enable_compile():
        thread = Thread(target=block.__exit__, args=(None, None, None))
        thread.start()
        thread.join()
        assert stance() == "default"
    assert (stance(), COMPILE_SWITCH.stance) == ("default", None)


def test_a_stance_set_by_the_user_stays(was_compiled: Callable[[], bool]) -> None:
    with torch.compiler.set_stance("force_eager"):
        with disable_compile(), enable_compile():
            assert not was_compiled()
        with enable_compile():
            assert not was_compiled()
        assert stance() == "force_eager"
    assert stance() == "default"


def test_a_block_inside_a_compiled_function_has_no_effect() -> None:
    """PyTorch refuses to change the setting there."""

    @torch.compile(backend="eager")
    def run(x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        with disable_compile():
            return x + 1

    with pytest.raises(Exception, match=r"set_stance|uncompiled"):
        run(torch.ones(2))
    assert (stance(), COMPILE_SWITCH.blocks, COMPILE_SWITCH.stance) == ("default", 0, None)
