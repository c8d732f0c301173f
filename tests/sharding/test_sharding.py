"""Attention of DTensors: outputs, gradients and statistics equal those of one process."""

import pytest

from foci.sharding.balance import head_tail_order
from tests.sharding.processes import run_processes


def assert_all_passed(results: list[tuple[int, str, str]]) -> None:
    for rank, (status, output, errors) in enumerate(results):
        assert (status, output) == (0, "passed\n"), f"rank {rank}: {output} {errors}"


def test_two_processes_compute_what_one_does() -> None:
    assert_all_passed(run_processes(2, "tests.sharding.worker", "few"))


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "check"), [(2, "calls"), (4, "calls"), (4, "pairs")])
def test_every_kind_of_call_on_lines_and_squares_of_processes(processes: int, check: str) -> None:
    assert_all_passed(run_processes(processes, "tests.sharding.worker", check, timeout=600))


@pytest.mark.slow
def test_a_process_that_dies_ends_the_others() -> None:
    (status, output, errors), (died, _, _) = run_processes(2, "tests.sharding.worker", "dies", timeout=60)
    assert died == 3
    assert status != 0
    assert output == ""
    assert "onnection" in errors


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_head_tail_order_gives_every_process_the_same_number_of_visible_keys(processes: int) -> None:
    order = head_tail_order(16, processes)
    assert order.sort().values.tolist() == list(range(16))
    assert len({int((part + 1).sum()) for part in order.chunk(processes)}) == 1


@pytest.mark.parametrize(("length", "processes"), [(10, 4), (8, 0)])
def test_head_tail_order_refuses_unequal_runs(length: int, processes: int) -> None:
    with pytest.raises(ValueError, match=r"^length must be a multiple of 2 · processes"):
        head_tail_order(length, processes)
