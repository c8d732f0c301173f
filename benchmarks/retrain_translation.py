"""Train the translator further on a GPU, with back-translation, within a fixed time.

    python benchmarks/retrain_translation.py --data DATA --out trained/translation --seconds 480

Two trainings run side by side: the translator, for nearly all of the time, and a model from German to English, which
then translates the German sentences of Common Voice. The translator adds these pairs as soon as they are there. A stage
that fails or is late is cut, and the next one does without it. DATA holds tatoeba_en_de and common_voice_text. The
folder gets translation.safetensors and reversed.safetensors, both in int8, and log.jsonl.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from threading import Thread
from typing import Any

BENCHMARKS = Path(__file__).resolve().parent
START = BENCHMARKS.parent / "foci" / "models" / "translation"
BEGAN = time.monotonic()
# Seconds before the end at which the translator is complete, and those that it may take to save itself.
RESERVE, SAVING = 35, 15
# The shares of the time of the reversed training, and of the back-translation.
REVERSED_SHARE, BACK_SHARE = 0.25, 0.2
# If a training fails, the next settings are tried: without the fused loss of R-Drop, and without worker processes.
FULL = ["--agreement", "3.0", "--dropout", "0.2", "--rate", "1e-3", "--storage", "int8", "--seed", "4"]
PLAIN = ["--agreement", "0.0", "--dropout", "0.2", "--rate", "6e-4", "--storage", "int8", "--seed", "5"]
SETTINGS = (FULL, PLAIN, [*PLAIN, "--workers", "0"])
# A training is not repeated with less time.
SHORTEST = 40
# The last lines of each log that are kept.
LOGGED = 1000


def main() -> None:
    """Run the stages, and collect what they wrote."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="the folder of the datasets")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, default=START, help="the model to continue from")
    parser.add_argument("--work", type=Path, default=Path("build/retrained"), help="a folder for logs and states")
    parser.add_argument("--seconds", type=float, default=480.0, help="the time of all stages together")
    parser.add_argument("--workers", type=int, default=8, help="processes that draw pairs; the other model gets half")
    parser.add_argument("--batch-tokens", type=int, default=20_000)
    parser.add_argument("--encoder-layers", type=int, default=10)
    parser.add_argument("--sentences", type=int, help="back-translate only so many sentences")
    options = parser.parse_args()
    for folder in (options.out, options.work):
        folder.mkdir(parents=True, exist_ok=True)
    stages = Stages(options)
    try:
        stages.run()
    finally:
        stages.collect()


class Stages:
    """The processes of the stages, each with a log and a folder."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.work = options, options.work
        self.back = self.work / "back.tsv"

    def run(self) -> None:
        """Train the translator beside the other stages."""
        sizes = ["--encoder-layers", self.options.encoder_layers, "--synthetic", self.back]
        end = self.options.seconds - RESERVE
        thread = Thread(target=self.train, args=("translation", end, self.options.workers, sizes))
        thread.start()
        self.translate_back()
        thread.join()

    def translate_back(self) -> None:
        """Train the model from German to English, and translate with it."""
        workers = max(self.options.workers // 2, 1)
        if self.train("reversed", self.options.seconds * REVERSED_SHARE, workers, ["--reverse"]):
            return
        seconds = self.options.seconds * BACK_SHARE
        sentences = self.options.data / "common_voice_text" / "de.txt.xz"
        arguments = [self.work / "reversed", sentences, "--data", self.options.data, "--out", self.back]
        arguments += ["--seconds", seconds] + (["--count", self.options.sentences] if self.options.sentences else [])
        process = self.start("back", "back_translation.py", arguments)
        self.wait(process, "back", self.elapsed + seconds + SAVING)

    def train(self, name: str, end: float, workers: int, arguments: list[Any]) -> int:
        """Run a training until so many seconds of the whole run; if it fails early, again with other settings."""
        sizes = ["--workers", workers, "--batch-tokens", self.options.batch_tokens, *arguments]
        for settings in SETTINGS:
            folders = [self.options.start, "--data", self.options.data, "--out", self.work / name]
            minutes = ["--minutes", (end - self.elapsed) / 60]
            process = self.start(name, "continue_translation.py", [*folders, *minutes, *sizes, *settings])
            code = self.wait(process, name, end + SAVING)
            if code == 0 or end - self.elapsed < SHORTEST:
                break
            (self.work / name / "state.pt").unlink(missing_ok=True)
        return code

    def start(self, name: str, script: str, arguments: list[Any]) -> subprocess.Popen[bytes]:
        command = [sys.executable, BENCHMARKS / script, *arguments]
        with (self.work / f"{name}.log").open("ab") as log:
            environment = os.environ | {"OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
            process = subprocess.Popen(list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, env=environment)
        self.report(name, "started")
        return process

    def wait(self, process: subprocess.Popen[bytes], name: str, end: float) -> int:
        """Wait for a process until so many seconds of the whole run, then ask it to stop, then stop it."""
        for ask, limit in ((process.terminate, end), (process.kill, end + SAVING)):
            try:
                process.wait(max(limit - self.elapsed, 0.1))
                break
            except subprocess.TimeoutExpired:
                ask()
        code = process.wait()
        self.report(name, f"ended with {code}")
        return code

    @property
    def elapsed(self) -> float:
        return time.monotonic() - BEGAN

    def report(self, name: str, event: str) -> None:
        print(f"{self.elapsed:6.1f} s  {name} {event}", flush=True)

    def collect(self) -> None:
        """Copy the models, and write the logs as one."""
        for name in ("translation", "reversed"):
            path = self.work / name / "model.safetensors"
            if path.exists():
                (self.options.out / f"{name}.safetensors").write_bytes(path.read_bytes())
        with (self.options.out / "log.jsonl").open("w") as file:
            for log in sorted(self.work.glob("*.log")):
                for line in log.read_text(errors="replace").splitlines()[-LOGGED:]:
                    file.write(json.dumps({"stage": log.stem, "line": line}) + "\n")
        self.report("all stages", "collected")


if __name__ == "__main__":
    main()
