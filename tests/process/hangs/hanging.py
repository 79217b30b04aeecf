"""The tiny job with ranks that hang, or only keep the others waiting; see `HANGS`.

HANGS=HOW:STEP:RANK,... in the environment, once each: the undisturbed run has none.
"""

from __future__ import annotations

import os
import re
import sys
import time
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import tiny
import trainmover

FOREVER_S = 600.0
SAVE_S = float(os.environ.get("SAVE_S", "0"))
PAUSE_S = float(os.environ.get("PAUSE_S", "0"))


class Hanging(tiny.Deaths):
    """Called in each window of a step."""

    def __call__(self, window: str) -> None:
        if self.job.is_shadow:
            return
        for text in filter(None, os.environ.get("HANGS", "").split(",")):
            how, step, rank = text.split(":")
            if int(step) == self.step and int(rank) == dist.get_rank():
                self.hang(how, window)

    def hang(self, how: str, window: str) -> None:
        if how == "sleeps" and window == "backward" and self.is_first(how):
            time.sleep(FOREVER_S)
        if how == "holds" and window == "backward" and self.is_first(how):
            # One call into C that gives the interpreter to no other thread.
            re.match(r"(a|a)*$", "a" * 40 + "b")
        if how == "saves" and window == "between" and self.is_first(how):
            time.sleep(SAVE_S)
        if how == "pauses" and window == "backward" and self.is_first(how):
            time.sleep(PAUSE_S)

    def is_first(self, how: str) -> bool:
        try:
            (self.folder / f"{how}-{self.step}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


if __name__ == "__main__":
    tiny.Deaths = Hanging
    trainmover.run(tiny.main)
