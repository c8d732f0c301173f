"""Cut the sentences of an4 into words and convert them to the spectrograms of the digit model.

    python benchmarks/an4_words.py --data DATA --out plain/an4_words

an4 has 84 speakers who say digits, letters and other words, as 13 cepstra per frame. Hidden Markov models of its phones
find where each word begins and ends: three states per phone, one Gaussian each, trained here by Viterbi alignment from
an equal division of the loud frames. The cepstra of a word are turned into log-mel bands on the scale of
`foci.inputs.audio.log_mel` at 8 kHz; they are smooth, because 13 cepstra hold no more.

OUT gets a .npy file per word, and tables of paths and words: train.tsv, dev.tsv (the first 100 sentences of train) and
test.tsv (ten other speakers).
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from datasets import members, mfcc, npy, transcripts, uncosined, write, write_table
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from foci.inputs.audio import ENERGY_FLOOR, add_deltas, hertz_to_mel, mel_to_hertz

RATE, BANDS = 8000, 48
# The mean energy of a sound of normal loudness: half the bins, times the squared Hann window, times 0.1 squared.
LEVEL = 256 * 75 * 0.01
SOURCE_RATE, LOWEST, HIGHEST, EMPHASIS = 16_000, 130.0, 6800.0, 0.97  # of the published cepstra
FIRST = 180.0  # the lowest frequency of the digit model: that of the middle of the first published filter
STATES, ROUNDS, SILENCE = 3, 10, "SIL"
DEV = 100
# Frames of silence that are kept on either side of a word, and the fewest frames of a word.
MARGIN, SHORTEST = 8, 8


class Chain(NamedTuple):
    """The states that a sentence may pass through."""

    phones: Tensor  # (N,), the index of the Gaussian of each state
    words: list[int]  # the word that each state belongs to; -1: silence
    before: Tensor  # (N, P), the states before each state, padded with itself
    last: list[int]  # where a sentence may end


def build_chain(words: Sequence[str], lexicon: dict[str, list[list[str]]], index: dict[str, int]) -> Chain:
    """Pronunciations side by side, and silence between words that may be skipped."""
    phones: list[int] = []
    owners: list[int] = []
    before: list[list[int]] = []

    def append(phone: str, owner: int, entries: list[int]) -> int:
        for state in range(STATES):
            own = len(phones)
            phones.append(index[phone] * STATES + state)
            owners.append(owner)
            before.append([own, *(entries if state == 0 else [own - 1])])
        return len(phones) - 1

    ends = [append(SILENCE, -1, [])]
    for position, word in enumerate(words):
        exits = []
        for pronunciation in lexicon[word]:
            entries = ends
            for phone in pronunciation:
                entries = [append(phone, position, entries)]
            exits += entries
        ends = [append(SILENCE, -1, exits), *exits]
    width = max(map(len, before))
    padded = torch.tensor([[*each, *[each[0]] * (width - len(each))] for each in before])
    return Chain(torch.tensor(phones), owners, padded, ends)


def align(scores: Tensor, chain: Chain) -> list[int]:
    """Viterbi: the state of each frame, from the log-likelihood of each Gaussian (F, G)."""
    own = scores[:, chain.phones]
    best = torch.full((len(chain.phones),), -math.inf)
    best[0] = own[0, 0]
    back = torch.zeros(own.shape, dtype=torch.long)
    for frame in range(1, len(own)):
        value, choice = best[chain.before].max(1)
        back[frame], best = choice, value + own[frame]
    state = max(chain.last, key=lambda each: float(best[each]))
    path, choices, before = [state], back.tolist(), chain.before.tolist()
    for frame in range(len(own) - 1, 0, -1):
        state = before[state][choices[frame][state]]
        path.append(state)
    return path[::-1]


def divide(cepstra: Tensor, chain: Chain) -> list[int]:
    """The first alignment: quiet frames are silence, the loud ones are divided equally among the first states."""
    loud = cepstra[:, 0] > cepstra[:, 0].quantile(0.15) + 0.35 * (cepstra[:, 0].max() - cepstra[:, 0].quantile(0.15))
    count = int(loud.sum())
    spoken = [state for state, owner in enumerate(chain.words) if owner >= 0]
    path, seen = [], 0
    for each in loud.tolist():
        path.append(spoken[seen * len(spoken) // count] if each else 0)
        seen += each
    return path


def fit_gaussians(features: Tensor, states: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The mean and the variance of each state: (G, D) each."""
    ones = torch.zeros(count).index_add_(0, states, torch.ones(len(states)))[:, None].clamp(min=1.0)
    mean = torch.zeros(count, features.shape[1]).index_add_(0, states, features) / ones
    square = torch.zeros(count, features.shape[1]).index_add_(0, states, features.square()) / ones
    floor = 0.05 * features.var(0)
    # A state with few frames is as wide as all frames.
    weight = (ones / 20.0).clamp(max=1.0)
    variance = weight * (square - mean.square()) + (1.0 - weight) * features.var(0)
    return mean, torch.maximum(variance, floor)


def score_frames(features: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """The log-likelihood of each frame under each Gaussian: (F, G)."""
    precision = 1.0 / variance
    distance = features.square() @ precision.mT - 2.0 * features @ (mean * precision).mT
    return -0.5 * (distance + (mean.square() * precision).sum(1) + variance.log().sum(1))


def find_words(cepstra: list[Tensor], texts: list[list[str]], lexicon: dict[str, list[list[str]]]) -> list[list[slice]]:
    """The frames of each word of each sentence."""
    phones = sorted({phone for each in lexicon.values() for way in each for phone in way} | {SILENCE})
    index = {phone: i for i, phone in enumerate(phones)}
    features = [add_deltas(each - each.mean(0)) for each in cepstra]
    chains = [build_chain(words, lexicon, index) for words in texts]
    paths = [divide(*pair) for pair in zip(cepstra, chains, strict=True)]
    joined = torch.cat(features)
    for number in range(ROUNDS):
        states = torch.cat([chain.phones[path] for chain, path in zip(chains, paths, strict=True)])
        mean, variance = fit_gaussians(joined, states, len(phones) * STATES)
        scores = score_frames(joined, mean, variance).split([len(each) for each in features])
        new = [align(*pair) for pair in zip(scores, chains, strict=True)]
        moved = sum(a != b for old, now in zip(paths, new, strict=True) for a, b in zip(old, now, strict=True))
        print(f"round {number + 1}: {100 * moved / len(joined):.1f}% of the frames changed their state", flush=True)
        paths = new
    return [locate(chain, path, len(words)) for chain, path, words in zip(chains, paths, texts, strict=True)]


def locate(chain: Chain, path: list[int], count: int) -> list[slice]:
    """The frames of each word, with some of the silence around it."""
    owners = [chain.words[state] for state in path]
    found = []
    for word in range(count):
        own = [frame for frame, owner in enumerate(owners) if owner == word]
        first, last = own[0], own[-1] + 1
        while first and owners[first - 1] == -1 and own[0] - first < MARGIN:
            first -= 1
        while last < len(owners) and owners[last] == -1 and last - own[-1] <= MARGIN:
            last += 1
        found.append(slice(first, last))
    return found


def to_bands(cepstra: Tensor) -> Tensor:
    """Cepstra of a word (F, 13) -> log-mel bands from FIRST Hz to half the RATE, at normal loudness: (F, BANDS)."""
    places = torch.linspace(float(hertz_to_mel(LOWEST)), float(hertz_to_mel(HIGHEST)), 42, dtype=torch.float64)[1:-1]
    edges = torch.linspace(float(hertz_to_mel(FIRST)), float(hertz_to_mel(RATE / 2)), BANDS + 2, dtype=torch.float64)
    at = ((edges[1:-1] - places[0]) / (places[1] - places[0])).clamp(0, len(places) - 1)
    low = at.floor().clamp(max=len(places) - 2).long()
    share = (at - low).float()
    bands = uncosined(cepstra)
    bands = bands[:, low] * (1.0 - share) + bands[:, low + 1] * share
    hertz = mel_to_hertz(edges)
    # The filters of the published cepstra have the area 1 and follow a pre-emphasis; ours have the height 1.
    width = (hertz[2:] - hertz[:-2]) / 2.0
    angle = 2.0 * math.pi * hertz[1:-1] / SOURCE_RATE
    emphasis = 1.0 + EMPHASIS**2 - 2.0 * EMPHASIS * angle.cos()
    bands = bands + (width / emphasis).log().float()
    bands = bands - bands.exp().sum(1).mean().log() + math.log(LEVEL)
    return bands.clamp(min=math.log(ENERGY_FLOOR))


def read_lexicon(content: str) -> dict[str, list[list[str]]]:
    """`A(2)  EY` -> {"a": [..., ["EY"]]}."""
    lexicon: dict[str, list[list[str]]] = {}
    for line in content.splitlines():
        word, *phones = line.split()
        lexicon.setdefault(re.sub(r"\(\d+\)", "", word).lower(), []).append(phones)
    return lexicon


def main() -> None:
    """Align, cut and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder with one folder per dataset")
    parser.add_argument("--out", type=Path, required=True, help="the output folder")
    options = parser.parse_args()
    # The operations are tiny: beside another program, threads would wait for each other.
    torch.set_num_threads(1)
    sounds: dict[str, Tensor] = {}
    rows: dict[str, list[tuple[str, str]]] = {}
    with tarfile.open(options.data / "an4_mfcc" / "an4_mfcc.tar.xz") as archive:
        for path, content in members(archive, ".mfc"):
            sounds[path.stem] = mfcc(content, str(path))
        for path, content in members(archive, ".transcription"):
            rows[path.stem] = list(transcripts(content.decode()))
        ((_, content),) = members(archive, "an4.dic")
    lexicon = read_lexicon(content.decode())
    train = rows["an4_train"]
    sentences = [("dev", *row) for row in train[:DEV]] + [("train", *row) for row in train[DEV:]]
    sentences += [("test", *row) for row in rows["an4_test"]]
    texts = [text.split() for _, text, _ in sentences]
    found = find_words([sounds[name] for _, _, name in sentences], texts, lexicon)
    tables: dict[str, list[tuple[str, str]]] = {"train": [], "dev": [], "test": []}
    for (split, _, name), words, parts in zip(sentences, texts, found, strict=True):
        for number, (word, part) in enumerate(zip(words, parts, strict=True)):
            if part.stop - part.start < SHORTEST:
                continue
            path = f"frames/{name}-{number}.npy"
            write(options.out / path, npy(to_bands(sounds[name][part])))
            tables[split].append((path, word))
    for split, table in tables.items():
        write_table(options.out / f"{split}.tsv", ("sound", "text"), table)
        print(f"{split}: {len(table)} words", flush=True)


if __name__ == "__main__":
    main()
