"""foci.Monitor: statistics equal to those of foci.watch, an unchanged training, alerts, writers, several processes."""

import copy
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import foci
from foci.capture.alerts import Alert, AttentionWarning
from foci.record.head_totals import HEAD_STATISTICS, compute_head_totals, head_statistics
from foci.record.history import History, StepStatistics
from foci.runtime.interception import KEY, is_key_included
from tests.capture.models import EagerAttention, FusedAttention, Stack

ROOT = Path(__file__).parent.parent.parent
TOKENS = torch.arange(24).view(2, 12)


class TorchEncoder(nn.Module):
    """nn.TransformerEncoder, whose attention is F.multi_head_attention_forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.embed(x))  # type: ignore[no-any-return]


def build_llama(implementation: str) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    import foci.hf  # noqa: F401

    config = LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaModel(config)
    model.set_attn_implementation(implementation)
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sdpa": Stack,
    "decoder": lambda: foci.nn.Decoder.from_name("tiny", vocabulary=50, dropout=0.1),
    "multihead": TorchEncoder,
    "llama sdpa": lambda: build_llama("sdpa"),
    "llama eager": lambda: build_llama("eager"),
    "llama foci": lambda: build_llama("foci"),
}


def output(model: nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    found = model(tokens)
    for name in ("logits", "last_hidden_state"):
        found = getattr(found, name, found)
    assert isinstance(found, Tensor)
    return found


def train_steps(model: nn.Module, monitor: foci.Monitor | None, steps: int = 3) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        torch.manual_seed(step)
        if monitor is None:
            loss = output(model).square().mean()
        else:
            with monitor:
                loss = output(model).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.log()
    return [parameter.detach().clone() for parameter in model.parameters()]


@pytest.mark.parametrize("case", MODELS)
def test_training_takes_the_same_course(case: str) -> None:
    torch.manual_seed(0)
    model = MODELS[case]().train()
    other = copy.deepcopy(model)
    monitor = foci.Monitor(model, every=1)
    monitored, plain = train_steps(model, monitor), train_steps(other, None)
    assert len(monitor.history) == 3
    assert monitor.unseen == []
    assert all(torch.equal(a, b) for a, b in zip(monitored, plain, strict=True))


@pytest.mark.parametrize("case", MODELS)
def test_statistics_are_those_of_the_recorded_weights(case: str) -> None:
    torch.manual_seed(0)
    model = MODELS[case]().eval()
    monitor = foci.Monitor(model)
    with monitor, torch.no_grad():
        output(model)
    (entry,) = monitor.log()
    with foci.watch(model) as seen, torch.no_grad():
        output(model)
    assert list(entry.layers) == [seen.name_of(layer) for layer in seen.layers.values()]
    for layer in seen.layers.values():
        expected = head_statistics(compute_head_totals(layer.weights, tuple(HEAD_STATISTICS)))
        for name, values in entry.layers[seen.name_of(layer)].items():
            torch.testing.assert_close(values, expected[name].float(), atol=1e-5, rtol=1e-5)


def count_hooks(model: nn.Module) -> int:
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


def test_nothing_is_hooked_on_other_steps() -> None:
    model = Stack()
    monitor = foci.Monitor(model, every=3)
    hooked = []
    for _ in range(6):
        with monitor:
            hooked.append(count_hooks(model) > 0 and is_key_included(KEY))
            output(model)
        assert count_hooks(model) == 0
        assert not is_key_included(KEY)
    assert hooked == [True, False, True, False, False, True]
    assert [entry.step for entry in monitor.log()] == [1, 3, 6]
    assert monitor.log() == []


def test_a_step_is_what_the_block_wraps() -> None:
    torch.manual_seed(0)
    model = foci.nn.Decoder.from_name("tiny", vocabulary=50).eval()
    tokens = torch.randint(50, (4, 12))
    whole, accumulated = foci.Monitor(model), foci.Monitor(model)
    with whole:
        output(model, tokens).mean().backward()
    with accumulated:
        for part in tokens.split(1):
            output(model, part).mean().backward()
    (one,), (other,) = whole.log(), accumulated.log()
    for layer, found in one.layers.items():
        for name, values in found.items():
            torch.testing.assert_close(values, other.layers[layer][name], atol=1e-5, rtol=1e-5)
        counts = one.histograms[layer]["entropy"].sum(-1)
        assert counts.tolist() == [48] * len(counts)


def test_recomputed_passes_are_not_counted_again() -> None:
    class Checkpointed(Stack):
        def forward(self, x: Tensor, **options: Any) -> Tensor:
            x = self.embed(x)
            for block in self.blocks:
                x = x + checkpoint(block, x, use_reentrant=False)
            return x

    model = Checkpointed()
    monitor = foci.Monitor(model)
    with monitor:
        loss = output(model).mean()
    # Outside the block, as training loops have it: the recomputation must save the same tensors.
    loss.backward()
    (entry,) = monitor.log()
    assert entry.histograms["L0"]["entropy"].sum(-1).tolist() == [24] * 4


def test_selected_layers_and_statistics() -> None:
    model = Stack()
    monitor = foci.Monitor(model, layers=[1], statistics=["heaviest", "largest_logit"])
    with monitor:
        output(model)
    (entry,) = monitor.log()
    assert {layer: list(found) for layer, found in entry.layers.items()} == {"L1": ["largest_logit", "heaviest"]}
    assert list(entry.histograms["L1"]) == ["heaviest"]


def test_unseen_attention_is_listed_with_a_warning() -> None:
    model = Stack(kind=EagerAttention)
    monitor = foci.Monitor(model, every=1)
    with (
        pytest.warns(AttentionWarning, match="3 attention modules of Stack are not monitored, such as blocks"),
        monitor,
    ):
        output(model)
    assert len(monitor.unseen) == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with monitor:
            output(model)
    assert [entry.layers for entry in monitor.log()] == [{}, {}]


def with_large_queries() -> Stack:
    torch.manual_seed(0)
    model = Stack(layers=2)
    with torch.no_grad():
        model.blocks[1].project.weight[4:8] *= 3000.0  # type: ignore[index, union-attr]
    return model


def test_alerts_name_the_worst_head() -> None:
    model, alerts = with_large_queries(), list[Alert]()
    monitor = foci.Monitor(model, every=1, on_alert=alerts.append, step=4199)
    with monitor:
        output(model)
    assert alerts == []
    monitor.log()
    (alert,) = alerts
    value = monitor.largest_logit["L1"][1].item()
    assert value > 100
    assert (alert.statistic, alert.head, alert.step, alert.value) == ("largest_logit", "L1H1", 4200, value)
    assert str(alert) == f"largest logit {value:.0f} in L1H1 at step 4,200 (above 100)"


def test_alerts_are_warnings_by_default() -> None:
    model = with_large_queries()
    monitor = foci.Monitor(model, alerts={"least_entropy": 0.5, "entropy": 0.0})
    with monitor:
        output(model)
    with pytest.warns(AttentionWarning, match=r"^least entropy .* in L1H1 at step 1 \(below 0.5\)$"):
        monitor.log()


def test_logits_that_are_not_finite_always_raise_an_alert() -> None:
    model, alerts = Stack(layers=1), list[Alert]()
    with torch.no_grad():
        model.blocks[0].project.weight[0] = torch.inf  # type: ignore[index, union-attr]
    monitor = foci.Monitor(model, alerts={}, on_alert=alerts.append)
    with monitor:
        output(model)
    monitor.log()
    assert [str(alert) for alert in alerts] == ["largest logit nan in L0H0 at step 1 (NaN or infinite logits)"]


class Board:
    """The two methods of TensorBoard's SummaryWriter that are used."""

    def __init__(self) -> None:
        self.scalars: dict[str, tuple[float, int]] = {}
        self.histograms: dict[str, dict[str, Any]] = {}

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.scalars[tag] = value, step

    def add_histogram_raw(self, tag: str, **fields: Any) -> None:
        self.histograms[tag] = fields


class Run:
    """A run of Weights & Biases."""

    def log(self, values: dict[str, float], step: int) -> None:
        self.values, self.step = values, step


def test_writers_get_the_same_numbers() -> None:
    board, run, calls = Board(), Run(), list[tuple[dict[str, float], int]]()
    for writer in (board, run, lambda values, step: calls.append((values, step))):
        torch.manual_seed(0)
        model = Stack()
        monitor = foci.Monitor(model)
        with monitor:
            output(model)
        monitor.log(writer, heads=True)
    entry = monitor.latest
    assert calls == [(run.values, 1)]
    assert {tag: (value, 1) for tag, value in run.values.items()} == board.scalars
    assert run.values["attention/largest_logit/L2"] == entry.layers["L2"]["largest_logit"].max().item()
    assert run.values["attention/entropy/L2"] == entry.layers["L2"]["entropy"].mean().item()
    assert run.values["attention/entropy/L2H3"] == entry.layers["L2"]["entropy"][3].item()
    histogram = board.histograms["attention/entropy/L0"]
    assert histogram["num"] == sum(histogram["bucket_counts"]) == 2 * 4 * 12
    assert len(histogram["bucket_limits"]) == len(histogram["bucket_counts"])
    monitor.step = 49
    with monitor:
        output(model)
    with pytest.raises(TypeError, match=r"writer must be a TensorBoard SummaryWriter, .* got int"):
        monitor.log(3)


def test_tensorboard_reads_what_is_written(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    model = Stack()
    monitor = foci.Monitor(model)
    with monitor:
        output(model)
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        monitor.log(writer)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path)).Reload()
    assert "attention/largest_logit/L0" in events.Tags()["scalars"]
    assert "attention/entropy/L0" in events.Tags()["histograms"]


class ValueReads(TorchDispatchMode):
    """Counts the operations that read values on the host, which wait for a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket in {
            torch.ops.aten._local_scalar_dense,
            torch.ops.aten.equal,
            torch.ops.aten.nonzero,
            torch.ops.aten.masked_select,
        }
        return func(*args, **kwargs or {})


# Not "llama eager": on a CPU only, a call with a dense bias reads whether its output has NaN.
@pytest.mark.parametrize("case", [case for case in MODELS if case != "llama eager"])
def test_a_monitored_step_reads_no_values(case: str) -> None:
    model = MODELS[case]().train()
    # For the heaviest weight of small inputs, the strips of the CPU read whether there are ties; a GPU has no strips.
    monitor = foci.Monitor(model, every=1, statistics=[name for name in HEAD_STATISTICS if name != "heaviest"])
    counts = []
    for block in (nullcontext(), monitor):
        output(model)
        with ValueReads() as reads, block:
            output(model)
        counts.append(reads.count)
    assert counts[1] <= counts[0]
    with ValueReads() as reads:
        float(torch.ones(()))
    assert reads.count == 1


def run_and_fail(model: nn.Module) -> None:
    output(model)
    raise ValueError("a fault of the model")


def test_a_failed_step_leaves_nothing_behind() -> None:
    model = Stack()
    monitor = foci.Monitor(model, every=1)
    with pytest.raises(ValueError, match="a fault of the model"), monitor:
        run_and_fail(model)
    assert count_hooks(model) == 0
    assert monitor.log() == []
    with monitor, pytest.raises(RuntimeError, match="must not be opened inside itself"):
        monitor.__enter__()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be an int of at least 1, got 0"),
        ({"statistics": ["entropie"]}, "statistics must be among largest_logit, .* got 'entropie'"),
        ({"alerts": {"logit": 1.0}}, "alerts must be among .* got 'logit'"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        foci.Monitor(Stack(), **options)


def compile_and_count(model: nn.Module) -> tuple[nn.Module, list[Any]]:
    """The compiled model, and the graphs that are compiled."""
    torch._dynamo.reset()
    graphs = list[Any]()

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return torch.compile(model, backend=backend, fullgraph=True), graphs  # type: ignore[return-value]


def test_other_compiled_models_run_uncompiled_on_monitored_steps() -> None:
    model = Stack(layers=1)
    compiled, graphs = compile_and_count(model)
    monitor = foci.Monitor(compiled, every=2, compiled=True)
    expected = output(model)
    for _ in range(5):
        with monitor:
            torch.testing.assert_close(output(compiled), expected)
    assert [entry.step for entry in monitor.log()] == [1, 2, 4]
    assert len(graphs) == 1
    assert monitor.uncompiled == "not all attention calls are those of foci.attention, which compiled graphs report"
    torch._dynamo.reset()


def test_compiled_models_run_uncompiled_by_default() -> None:
    model = foci.nn.Decoder.from_name("tiny", vocabulary=50, dropout=0.0)
    compiled, graphs = compile_and_count(model)
    monitor = foci.Monitor(compiled, every=1)
    for _ in range(2):
        with monitor:
            output(compiled)
    assert graphs == []
    assert monitor.uncompiled == "pass compiled=True for a second compiled graph"
    assert [entry.step for entry in monitor.log()] == [1, 2]
    torch._dynamo.reset()


def test_compiled_models_that_call_foci_run_a_second_graph() -> None:
    torch.manual_seed(0)
    model = foci.nn.Decoder.from_name("tiny", vocabulary=50, dropout=0.0)
    compiled, graphs = compile_and_count(model)
    monitor, plain = foci.Monitor(compiled, every=3, compiled=True), foci.Monitor(model, every=3)
    found = []
    for _ in range(6):
        with monitor:
            # Two micro-batches.
            for part in TOKENS.split(1):
                output(compiled, part).mean().backward()
        found.append(len(graphs))
        with plain:
            for part in TOKENS.split(1):
                output(model, part)
    assert monitor.uncompiled is None
    assert found == [0, 1, 2, 2, 2, 2]
    for entry, expected in zip(monitor.log(), plain.log(), strict=True):
        assert entry.step == expected.step
        for layer, values in expected.layers.items():
            torch.testing.assert_close(entry.layers[layer], values, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


class MaskedByFunction(nn.Module):
    """Attention whose mask is a function, which no operator takes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.attention = foci.nn.Attention(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(self.embed(x), mask=foci.mask_function(lambda b, h, q, k: k <= q))  # type: ignore[no-any-return]


def test_compiled_models_with_other_masks_run_uncompiled() -> None:
    compiled, graphs = compile_and_count(MaskedByFunction())
    monitor = foci.Monitor(compiled, every=1, compiled=True)
    for _ in range(2):
        with monitor:
            output(compiled)
    assert monitor.uncompiled == "L0 has a score, mask or bias whose statistics cannot be compiled"
    assert [entry.step for entry in monitor.log()] == [1, 2]
    assert graphs == []
    torch._dynamo.reset()


class Repeating(nn.Module):
    """A decoder that makes some calls of its first block once more."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = foci.nn.Decoder.from_name("tiny", vocabulary=50, dropout=0.0)
        self.repeats = False

    def forward(self, x: Tensor) -> Any:
        if self.repeats:
            self.decoder.blocks[0].attention(torch.ones(1, 4, 128))
        return self.decoder(x)


def test_a_compiled_step_with_other_calls_is_left_out() -> None:
    model = Repeating()
    compiled, _ = compile_and_count(model)
    monitor = foci.Monitor(compiled, every=1, compiled=True)
    with monitor:
        output(compiled)
    model.repeats = True
    monitor.__enter__()
    output(compiled)
    with pytest.warns(AttentionWarning, match="step 2 was not monitored: a compiled step made 3 attention calls"):
        monitor.__exit__(None, None, None)
    with monitor:
        output(compiled)
    assert [entry.step for entry in monitor.log()] == [1, 3]
    torch._dynamo.reset()


def test_calls_of_a_teacher_in_a_compiled_step_are_not_counted() -> None:
    student, teacher = (foci.nn.Decoder.from_name("tiny", vocabulary=50, dropout=0.0) for _ in range(2))
    compiled, _ = compile_and_count(student)
    monitor, plain = foci.Monitor(compiled, every=1, compiled=True), foci.Monitor(student, every=1)
    for _ in range(2):
        with monitor:
            output(teacher)
            output(compiled)
            output(teacher)
        with plain:
            output(student)
    assert monitor.uncompiled is None
    for entry, expected in zip(monitor.log(), plain.log(), strict=True):
        for layer, values in expected.layers.items():
            torch.testing.assert_close(entry.layers[layer], values, rtol=1e-5, atol=1e-5)
    torch._dynamo.reset()


WORKER = """
import os, sys, torch, torch.distributed as dist, foci
from tests.capture.test_monitor import shared_model, shared_tokens
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
model = shared_model()
monitor = foci.Monitor(model, every=1, on_alert=print)
calls, gather = [], dist.all_gather
dist.all_gather = lambda *inputs, **options: (calls.append(1), gather(*inputs, **options))
for step in range(2):
    with monitor:
        for part in shared_tokens(step).chunk(world)[rank].split(1 + rank % 2):
            model(part)
monitor.log()
assert len(calls) == 2, "one collective per monitored step"
torch.save([(e.step, e.layers, e.histograms) for e in monitor.history], f"{sys.argv[1]}/{rank}.pt")
dist.destroy_process_group()
"""


def shared_model() -> Stack:
    torch.manual_seed(3)
    return Stack(layers=2)


def shared_tokens(step: int) -> Tensor:
    return torch.randint(50, (8, 12), generator=torch.Generator().manual_seed(step))


def run_processes(world: int, folder: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world)}
    shared |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(folder)],
            env=shared | {"RANK": str(rank)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    said = [process.communicate(timeout=120)[1] for process in running]
    assert [process.returncode for process in running] == [0] * world, said


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_processes_give_the_statistics_of_one(world: int, tmp_path: Path) -> None:
    model = shared_model()
    monitor = foci.Monitor(model, every=1)
    for step in range(2):
        with monitor:
            model(shared_tokens(step))
    one = monitor.log()
    run_processes(world, tmp_path)
    for rank in range(world):
        found = [StepStatistics(*entry) for entry in torch.load(tmp_path / f"{rank}.pt")]
        assert [entry.step for entry in found] == [1, 2]
        for entry, expected in zip(found, one, strict=True):
            for layer, values in expected.layers.items():
                torch.testing.assert_close(entry.layers[layer], values, rtol=1e-5, atol=1e-6)
        # The latest step has its histograms.
        assert all(
            torch.equal(found[-1].histograms[layer][name], counts)
            for layer, each in one[-1].histograms.items()
            for name, counts in each.items()
        )


def test_history_of_a_monitor() -> None:
    model = Stack()
    monitor = foci.Monitor(model, every=2)
    for _ in range(4):
        with monitor:
            output(model)
        monitor.log()
    assert repr(monitor) == "Monitor of Stack: every 2 steps, at step 4, 3 logged"
    assert isinstance(monitor.history, History)
    found = monitor.to_dict()
    assert found["steps"] == [1, 2, 4]
    assert found["layers"]["L2"]["entropy"][2] == pytest.approx(
        monitor.latest.layers["L2"]["entropy"].tolist(), rel=1e-5
    )
    assert [bool(entry.histograms) for entry in monitor.history] == [False, False, True]
    with pytest.raises(RuntimeError, match="latest needs a logged step"):
        _ = foci.Monitor(FusedAttention()).latest
