"""What people have today: the model of train_gpt.py under plain torchrun, Gloo DDP and torch DCP.

The other side of `trainmover bench recovery`. It saves every N steps, loads the newest checkpoint
when it starts, and is restarted by torchrun; nothing of trainmover's runtime takes part. Where
there is a choice it takes the one that favours the baseline: the sampler skips by index, no batch
is read twice, and the random state is saved too.

    torchrun --nproc-per-node 4 --max-restarts 3 examples/baselines/torchrun_dcp.py --folder /tmp/b

Writes one JSON line per event and rank into FOLDER/events, with CLOCK_MONOTONIC times.
"""

from __future__ import annotations

import time

STARTED_S = time.monotonic()

import argparse  # noqa: E402  (the clock is read before the expensive imports)
import json  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.utils.data import DataLoader, Sampler  # noqa: E402

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train_gpt  # noqa: E402

IMPORTED_S = time.monotonic()
WAIT_LIMIT_S = 600.0


class Journal:
    """This process's event file: what happened, when, and which process it was."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.rank = rank
        self.file = (folder / f"{os.getpid()}.jsonl").open("a", buffering=1, encoding="utf-8")

    def write(self, event: str, time_s: float | None = None, **facts: Any) -> None:
        line = {
            "event": event,
            "rank": self.rank,
            "pid": os.getpid(),
            "agent": os.getppid(),
            "time_s": time.monotonic() if time_s is None else time_s,
        }
        self.file.write(json.dumps(line | facts) + "\n")


class Remaining(Sampler[int]):
    """What an epoch's sampler still has after the first `skipped` samples."""

    def __init__(self, sampler: Any, skipped: int) -> None:
        self.sampler = sampler
        self.skipped = skipped

    def __iter__(self) -> Iterator[int]:
        return iter(list(self.sampler)[self.skipped :])


def batches_from(args: argparse.Namespace, step: int) -> Iterator[torch.Tensor]:
    """The batches of steps `step`, `step` + 1, ... over as many epochs as it takes."""
    loader = train_gpt.build_loader(args)
    epoch, done = divmod(step, len(loader))
    while True:
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        yield from DataLoader(
            loader.dataset,
            batch_size=args.batch,
            sampler=Remaining(loader.sampler, done * args.batch),
            num_workers=args.workers,
            drop_last=True,
        )
        epoch, done = epoch + 1, 0


class Checkpoints:
    """DCP directories and a file that names the newest complete one."""

    def __init__(
        self, folder: Path, model: torch.nn.Module, optimizer: Any, scheduler: Any
    ) -> None:
        self.folder = folder
        self.model = model
        self.optimizer = optimizer
        self.scheduler = scheduler

    def _state(self, step: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.scheduler.state_dict(),
            f"rng.{dist.get_rank()}": torch.get_rng_state(),
            "step": torch.tensor(step),
        }

    def save(self, step: int) -> None:
        """Collective. Everything needed to enter step `step`."""
        dcp.save(self._state(step), checkpoint_id=self.folder / f"step-{step}")
        if dist.get_rank() == 0:
            partial = self.folder / "newest.partial"
            partial.write_text(str(step))
            partial.rename(self.folder / "newest")

    def load(self) -> int:
        """Collective. The step to enter: 0 without a checkpoint."""
        newest = self.folder / "newest"
        if not newest.exists():
            return 0
        state = self._state(0)
        dcp.load(state, checkpoint_id=self.folder / f"step-{newest.read_text()}")
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.scheduler.load_state_dict(state["scheduler"])
        torch.set_rng_state(state[f"rng.{dist.get_rank()}"])
        return int(state["step"].item())


def use_cache(args: argparse.Namespace) -> None:
    """Each played machine has a compile cache of its own; a replaced one starts with none."""
    if args.cache is None:
        return
    rank, life = os.environ["RANK"], os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    is_replaced = rank == str(args.cold_rank) and life != "0"
    name = f"rank-{rank}-life-{life}" if is_replaced else f"rank-{rank}"
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(args.cache / name)


def wait_for(path: Path) -> None:
    """A job that is to be killed must not end before, however slow its killer is."""
    deadline = time.monotonic() + WAIT_LIMIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} was not made in {WAIT_LIMIT_S:.0f} s")
        time.sleep(0.02)


def train(args: argparse.Namespace) -> None:
    use_cache(args)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    journal = Journal(args.folder / "events", rank)
    journal.write("started", STARTED_S)
    journal.write("imported", IMPORTED_S)
    journal.write("connected")
    model = train_gpt.build_model(args, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.1)
    scheduler = train_gpt.build_schedule(optimizer, args.steps)
    torch.manual_seed(args.seed + rank)
    checkpoints = Checkpoints(args.folder, model, optimizer, scheduler)
    journal.write("built")
    first = checkpoints.load()
    journal.write("restored", step=first)
    batches = batches_from(args, first)
    last = args.steps if args.stop_before is None else args.stop_before
    for step in range(first, args.steps):
        if step == last and first < last:
            checkpoints.save(step)
            journal.write("saved", step=step)
            break
        if step > first and step % args.every == 0:
            checkpoints.save(step)
        if step == args.wait_at:
            wait_for(args.wait_for)
        window = next(batches)
        loss = model(window[:, :-1], window[:, 1:])
        loss.backward()
        mean = train_gpt.mean_over_ranks(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        journal.write("step", step=step, loss=float(mean).hex())
    dist.barrier()
    # destroy_process_group() hangs at times in torch 2.13: it joins Gloo's run loop while it holds
    # the interpreter's lock that the run loop waits for.
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("--folder", type=Path, required=True, help="checkpoints and events")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    parser.add_argument("--stop-before", type=int, help="save before this step and exit 0")
    parser.add_argument("--wait-at", type=int, help="step in front of which --wait-for is awaited")
    parser.add_argument("--wait-for", type=Path, help="file that somebody else makes")
    parser.add_argument("--cache", type=Path, help="folder for one compile cache per rank")
    parser.add_argument("--cold-rank", type=int, help="rank whose cache is gone after a restart")
    own, rest = parser.parse_known_args()
    train(argparse.Namespace(**vars(train_gpt.parse_arguments(rest)), **vars(own)))


if __name__ == "__main__":
    main()
