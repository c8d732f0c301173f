"""One process of a training; the last one ends without a word at the third step."""

import os
import sys

from foci.cli.main import main
from foci.training import loop
from tests.training.reversal import SMALL

if os.environ["RANK"] == "1":
    run_training_step = loop.run_training_step

    def end_at_third_step(*arguments: object) -> object:
        if arguments[3] == 2:
            os._exit(3)
        return run_training_step(*arguments)  # type: ignore[arg-type]

    loop.run_training_step = end_at_third_step  # type: ignore[assignment]

if __name__ == "__main__":
    data, folder = sys.argv[1:]
    options = [part for change in (*SMALL, "train.parallel=tp=2") for part in ("--set", change)]
    sys.exit(main(["train", "translation", "--data", data, "--out", folder, *options]))
