"""Modules built on `foci.attention`: attention layers, blocks, whole models, and conversion from other libraries.

config: the configs of blocks and models, which check their fields.
layout: padding and packed documents of a batch, as masks and positions.
positions: position tables, rotary embeddings and learned relative biases.
learned_scores: scores with parameters.
embedding: the embedding of tokens, and the head that computes logits.
layer_caches: the key/value caches of all layers during generation.
attention: multi-head attention.
multihead, multihead_checks: a drop-in replacement for torch.nn.MultiheadAttention, and its argument checks.
block: attention and a feed-forward network with norms and residual connections.
model: the base class of models, which saves and loads them.
stack: the stack of blocks that encoder and decoder share.
transformer: Encoder, Decoder and EncoderDecoder.
pointer_generator, recurrent, speech, vision, classifier: models for particular tasks.
token_loss: the cross-entropy of a head in little memory.
from_torch, from_huggingface: conversion of models of torch.nn and of transformers.
"""

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


def __dir__() -> list[str]:
    return sorted(__all__)
