"""Modules built on `foci.attention`: attention layers, blocks, whole Transformers, and models of other libraries."""

from foci.nn.attention import Attention
from foci.nn.block import Block, FeedForward
from foci.nn.caches import Caches
from foci.nn.config import BlockConfig, Config, EncoderDecoderConfig, TransformerConfig
from foci.nn.embed import BucketTable, LearnedPositions, RelativeTable, Rotary, SinusoidalPositions
from foci.nn.ends import Embedding, Head
from foci.nn.layout import Layout
from foci.nn.model import Model
from foci.nn.multihead import MultiheadAttention
from foci.nn.scores import AdditiveScore, CosineScore, GeneralScore
from foci.nn.stack import Memory, Output
from foci.nn.transformer import Decoder, Encoder, EncoderDecoder

__all__ = [
    "AdditiveScore",
    "Attention",
    "Block",
    "BlockConfig",
    "BucketTable",
    "Caches",
    "Config",
    "CosineScore",
    "Decoder",
    "Embedding",
    "Encoder",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "FeedForward",
    "GeneralScore",
    "Head",
    "Layout",
    "LearnedPositions",
    "Memory",
    "Model",
    "MultiheadAttention",
    "Output",
    "RelativeTable",
    "Rotary",
    "SinusoidalPositions",
    "TransformerConfig",
]
