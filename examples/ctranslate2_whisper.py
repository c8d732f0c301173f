"""Load a Whisper model in CTranslate2's format as transformers' WhisperForConditionalGeneration.

The file model.bin holds named arrays; the projections of queries, keys and values are one matrix.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

TYPES = {
    0: torch.float32,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.float16,
    5: torch.bfloat16,
}
NORMS = {"gamma": "weight", "beta": "bias"}
# The English models: end of text, start of the transcript, no timestamps.
END, START, PLAIN = 50256, 50257, 50362


def whisper(folder: Path) -> Any:
    """Load the model from a folder with model.bin and config.json."""
    from transformers import GenerationConfig, WhisperForConditionalGeneration

    arrays = read_arrays(folder / "model.bin")
    model = WhisperForConditionalGeneration(read_config(arrays))
    missing, unknown = model.load_state_dict(rename_arrays(arrays), strict=False)
    # The output layer is tied to the embedding, and CTranslate2 stores it once.
    if set(missing) - {"proj_out.weight"} or unknown:
        raise ValueError(
            f"model.bin must hold a Whisper model, got missing arrays {missing} and unknown arrays {unknown}"
        )
    settings = json.loads((folder / "config.json").read_text())
    model.generation_config = GenerationConfig(
        decoder_start_token_id=START,
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        no_timestamps_token_id=PLAIN,
        is_multilingual=False,
        suppress_tokens=settings["suppress_ids"],
        begin_suppress_tokens=settings["suppress_ids_begin"],
        alignment_heads=settings["alignment_heads"],
        max_length=448,
    )
    return model.eval()


def read_arrays(path: Path) -> dict[str, Tensor]:
    """The named arrays of a model.bin."""
    with path.open("rb") as file:
        version, name, _ = number(file, "I"), text(file), number(file, "I")
        if version < 6 or name != "WhisperSpec":
            raise ValueError(f"{path} must be a WhisperSpec of version 6 or later, got {name} of version {version}")
        return dict(array(file) for _ in range(number(file, "I")))


def number(file: BinaryIO, form: str) -> int:
    found: tuple[int] = struct.unpack(f"<{form}", file.read(struct.calcsize(form)))
    return found[0]


def text(file: BinaryIO) -> str:
    return file.read(number(file, "H"))[:-1].decode()


def array(file: BinaryIO) -> tuple[str, Tensor]:
    name = text(file)
    shape = [number(file, "I") for _ in range(number(file, "B"))]
    kind = TYPES[number(file, "B")]
    content = bytearray(file.read(number(file, "I")))
    return name, torch.frombuffer(content, dtype=kind).reshape(shape)


def read_config(arrays: dict[str, Tensor]) -> Any:
    from transformers import WhisperConfig

    width, bands = arrays["encoder/conv1/weight"].shape[:2]
    layers = {
        part: sum(name.startswith(part) and name.endswith("ffn/linear_0/bias") for name in arrays) for part in PARTS
    }
    return WhisperConfig(
        vocab_size=arrays["decoder/embeddings/weight"].shape[0],
        num_mel_bins=bands,
        d_model=width,
        encoder_layers=layers["encoder"],
        decoder_layers=layers["decoder"],
        encoder_attention_heads=int(arrays["encoder/num_heads"]),
        decoder_attention_heads=int(arrays["decoder/num_heads"]),
        encoder_ffn_dim=arrays["encoder/layer_0/ffn/linear_0/bias"].shape[0],
        decoder_ffn_dim=arrays["decoder/layer_0/ffn/linear_0/bias"].shape[0],
        max_source_positions=arrays["encoder/position_encodings/encodings"].shape[0],
        max_target_positions=arrays["decoder/position_encodings/encodings"].shape[0],
        bos_token_id=END,
        eos_token_id=END,
        pad_token_id=END,
        decoder_start_token_id=START,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    )


PARTS = ("encoder", "decoder")


def rename_arrays(arrays: dict[str, Tensor]) -> dict[str, Tensor]:
    """The arrays under the names of transformers, in float32."""
    found: dict[str, Tensor] = {}
    for name, values in arrays.items():
        if values.is_floating_point():
            found |= {f"model.{new}": part.float() for new, part in split_array(name.split("/"), values)}
    return found


def split_array(path: list[str], values: Tensor) -> list[tuple[str, Tensor]]:
    """One array of CTranslate2 as one, two or three arrays of transformers."""
    part, *rest = path
    if rest[0] == "position_encodings":
        return [(f"{part}.embed_positions.weight", values)]
    if rest[0] == "embeddings":
        return [(f"{part}.embed_tokens.weight", values)]
    if not rest[0].startswith("layer_") or rest[0] == "layer_norm":
        return [(".".join([part, *rest[:-1], NORMS.get(rest[-1], rest[-1])]), values)]
    layer, block, *inner = rest
    return [
        (f"{part}.layers.{layer.removeprefix('layer_')}.{new}.{NORMS.get(inner[-1], inner[-1])}", each)
        for new, each in split_block(block, inner[0], values)
        if not (new.endswith("k_proj") and inner[-1] == "bias")
    ]


def split_block(block: str, what: str, values: Tensor) -> list[tuple[str, Tensor]]:
    """The projections of a block by name; Whisper's keys have no bias, which is 0 in the merged matrix."""
    if block == "ffn":
        return [({"layer_norm": "final_layer_norm", "linear_0": "fc1", "linear_1": "fc2"}[what], values)]
    own = {"self_attention": "self_attn", "attention": "encoder_attn"}[block]
    if what == "layer_norm":
        return [(f"{own}_layer_norm", values)]
    joined = {
        ("self_attn", "linear_0"): "qkv",
        ("self_attn", "linear_1"): "",
        ("encoder_attn", "linear_0"): "q",
        ("encoder_attn", "linear_1"): "kv",
        ("encoder_attn", "linear_2"): "",
    }[own, what]
    if not joined:
        return [(f"{own}.out_proj", values)]
    return [(f"{own}.{letter}_proj", each) for letter, each in zip(joined, values.chunk(len(joined)), strict=True)]
