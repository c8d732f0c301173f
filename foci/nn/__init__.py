"""Modules built on `foci.attention`: attention layers, blocks, whole Transformers, and models of other libraries."""

from foci.nn.attention import Attention
from foci.nn.block import Block, FeedForward
from foci.nn.classifier import ClassifierConfig, TextClassifier
from foci.nn.config import BlockConfig, Config, EncoderDecoderConfig, TransformerConfig
from foci.nn.embedding import Embedding, Head
from foci.nn.from_huggingface import from_huggingface
from foci.nn.from_torch import load_torch_layer, load_torch_transformer
from foci.nn.layer_caches import Caches
from foci.nn.layout import Layout
from foci.nn.learned_scores import AdditiveScore, CosineScore, GeneralScore
from foci.nn.model import Model
from foci.nn.multihead import MultiheadAttention
from foci.nn.pointer_generator import CopyingTransformer
from foci.nn.positions import BucketTable, LearnedPositions, RelativeTable, Rotary, SinusoidalPositions
from foci.nn.recurrent import RecurrentConfig, Seq2SeqRNN
from foci.nn.speech import SpeechConfig, SpeechEncoder, read_ctc
from foci.nn.stack import Memory, Output
from foci.nn.token_loss import token_loss
from foci.nn.transformer import Decoder, Encoder, EncoderDecoder
from foci.nn.vision import VisionConfig, VisionTransformer

__all__ = [
    "AdditiveScore",
    "Attention",
    "Block",
    "BlockConfig",
    "BucketTable",
    "Caches",
    "ClassifierConfig",
    "Config",
    "CopyingTransformer",
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
    "RecurrentConfig",
    "RelativeTable",
    "Rotary",
    "Seq2SeqRNN",
    "SinusoidalPositions",
    "SpeechConfig",
    "SpeechEncoder",
    "TextClassifier",
    "TransformerConfig",
    "VisionConfig",
    "VisionTransformer",
    "from_huggingface",
    "load_torch_layer",
    "load_torch_transformer",
    "read_ctc",
    "token_loss",
]
