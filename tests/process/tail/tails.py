"""Steps whose collectives come behind the update, in one script: `tails.py KIND --out DIR`.

Each rank writes one JSON line per step: its loss, what it got from the others behind the update,
digests of parameters, optimizer and generators. A line written again after a loss replaces the one
before, so the last lines of an interrupted job must be those of an undisturbed one.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import trainmover

BATCH = 4
HOLD_LIMIT_S = 100.0


class Numbered(Dataset[Any]):
    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> torch.Tensor:
        values = [float((index * k) % 17) / 17 for k in range(1, 7)]
        return torch.tensor(values) + 0.01 * torch.rand(6)


def net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = nn.Sequential(
        nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 6)
    )
    return DistributedDataParallel(layers)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = nn.functional.mse_loss(model(batch), batch.flip(1))
    return found


def digest(tensors: Iterable[torch.Tensor]) -> str:
    found = xxhash.xxh3_64()
    for tensor in tensors:
        found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    inner = getattr(optimizer, "optim", optimizer)
    states = [inner.state[p] for group in inner.param_groups for p in group["params"]]
    return [state[name] for state in states for name in sorted(state)]


class Bench:
    """What all kinds share."""

    def __init__(self, job: trainmover.Job, args: argparse.Namespace) -> None:
        self.job = job
        self.args = args
        self.best = trainmover.Value(1e9)
        data = Numbered()
        sampler: DistributedSampler[Any] = DistributedSampler(data, shuffle=True, seed=3)
        self.batches = job.batches(DataLoader(data, batch_size=BATCH, sampler=sampler))
        self.models: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []

    def add(self, seed: int, rate: float = 1e-2) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net(seed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        self.models.append(model)
        self.optimizers.append(optimizer)
        return model, optimizer

    def track(self, **more: object) -> None:
        self.job.seed(7)
        models = {f"model{i}": model for i, model in enumerate(self.models)}
        optimizers = {f"optimizer{i}": each for i, each in enumerate(self.optimizers)}
        self.job.track(**models, **optimizers, best=self.best, **more)

    def improve(self, mean: float) -> None:
        """Python state that depends on what the tail has shown."""
        self.best.value = min(self.best.value, mean)

    def note(self, step: trainmover.Step, **values: Any) -> None:
        if not step.committed:
            return
        line = {name: float(value).hex() for name, value in values.items()}
        rate = self.optimizers[0].param_groups[0]["lr"]
        parameters = [p for model in self.models for p in model.state_dict().values()]
        states = [tensor for optimizer in self.optimizers for tensor in moments(optimizer)]
        line |= {
            "rate": float(rate).hex(),
            "best": float(self.best.value).hex(),
            "parameters": digest(parameters),
            "optimizers": digest(states),
            "torch": digest([torch.get_rng_state()]),
            "python": xxhash.xxh3_64_hexdigest(repr(random.getstate()).encode()),
        }
        with open(self.args.out / f"rank{self.job.rank}.jsonl", "a") as file:
            file.write(json.dumps({"step": step.index, **line}) + "\n")
        time.sleep(self.args.pace)
        if step.index == self.args.hold_at and self.job.is_primary:
            self.hold()

    def hold(self) -> None:
        """Until the test says so; the others wait in their next collective."""
        deadline = time.monotonic() + HOLD_LIMIT_S
        while not (self.args.out / "go").exists() and time.monotonic() < deadline:
            time.sleep(0.02)


def mean_of(loss: torch.Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def scale_gradients(model: nn.Module, factor: float) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


# ------------------------------------------------------------------ kinds


def metric(bench: Bench) -> None:
    """The mean loss behind the update: logged, and what the schedule goes by."""
    model, optimizer = bench.add(1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    bench.track(scheduler=scheduler)
    for step in bench.job.steps(bench.args.steps):
        mean = 0.0
        with step:
            loss = loss_of(model, next(bench.batches))
            loss.backward()
            optimizer.step()
            mean = mean_of(loss)
            scheduler.step(mean)
            optimizer.zero_grad()
            bench.improve(mean)
            step.log(loss=loss, mean=mean)
        bench.note(step, loss=loss, mean=mean)


def behind(bench: Bench) -> None:
    """The same behind the block, where no exception can lead out of."""
    model, optimizer = bench.add(1)
    bench.track()
    for step in bench.job.steps(bench.args.steps):
        with step:
            loss = loss_of(model, next(bench.batches))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
        mean = mean_of(loss)
        dist.barrier()
        if step.committed:
            bench.improve(mean)
        bench.note(step, loss=loss, mean=mean)


def waiting(bench: Bench) -> None:
    """Two at once, waited for later; and a gather of the parameters' norms."""
    model, optimizer = bench.add(1)
    bench.track()
    for step in bench.job.steps(bench.args.steps):
        total, most, norms = torch.zeros(1), torch.zeros(1), [torch.zeros(1)] * 3
        with step:
            loss = loss_of(model, next(bench.batches))
            loss.backward()
            optimizer.step()
            total, most = loss.detach().reshape(1).clone(), loss.detach().reshape(1).clone()
            works = [dist.all_reduce(total, async_op=True)]
            works.append(dist.all_reduce(most, op=dist.ReduceOp.MAX, async_op=True))
            optimizer.zero_grad()
            for work in works:
                assert work is not None
                work.wait()
            norm = torch.stack([p.detach().norm() for p in model.parameters()]).sum().reshape(1)
            norms = [torch.zeros(1) for _ in range(dist.get_world_size())]
            dist.all_gather(norms, norm)
            step.log(loss=loss, total=total, most=most)
        bench.note(step, loss=loss, total=total, most=most, norm=torch.stack(norms).sum())


def two(bench: Bench) -> None:
    """A collective between two optimizers' updates, and what it gives scales the second."""
    model, optimizer = bench.add(1)
    other, second = bench.add(2)
    bench.track()
    for step in bench.job.steps(bench.args.steps):
        mean = 0.0
        with step:
            batch = next(bench.batches)
            loss = loss_of(model, batch) + loss_of(other, batch)
            loss.backward()
            optimizer.step()
            mean = mean_of(loss)
            scale_gradients(other, mean)
            second.step()
            optimizer.zero_grad()
            second.zero_grad()
            step.log(loss=loss, mean=mean)
        bench.note(step, loss=loss, mean=mean)


def adversarial(bench: Bench) -> None:
    """Two updates with a backward pass, and its collectives, between them."""
    model, optimizer = bench.add(1)
    other, second = bench.add(2)
    bench.track()
    for step in bench.job.steps(bench.args.steps):
        with step:
            batch = next(bench.batches)
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            rest = loss_of(other, model(batch).detach())
            rest.backward()
            second.step()
            second.zero_grad()
            step.log(loss=loss)
        bench.note(step, loss=loss, rest=rest)


def callable_form(bench: Bench) -> None:
    """`step.run`, with a collective inside and one behind it."""
    model, optimizer = bench.add(1)
    bench.track()

    def update(step: trainmover.Step, batch: torch.Tensor) -> tuple[float, float]:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = mean_of(loss)
        step.log(loss=loss, mean=mean)
        return loss.item(), mean

    for step in bench.job.steps(bench.args.steps):
        found = step.run(update, step, next(bench.batches))
        if found is None:
            continue
        loss, mean = found
        late = mean_of(torch.tensor(loss))
        bench.note(step, loss=loss, mean=mean, late=late)


def zero(bench: Bench) -> None:
    """Sharded optimizer state: every update ends in broadcasts of the parameters."""
    model = net(1)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2
    )
    bench.models.append(model)
    bench.optimizers.append(optimizer)
    bench.track()
    for step in bench.job.steps(bench.args.steps):
        with step:
            loss = loss_of(model, next(bench.batches))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
        bench.note(step, loss=loss)


def saving(bench: Bench) -> None:
    """Rank 0 saves for long behind the update of one step, once per job."""
    model, optimizer = bench.add(1)
    bench.track()
    mark = bench.args.out / "saved"
    for step in bench.job.steps(bench.args.steps):
        with step:
            loss = loss_of(model, next(bench.batches))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step.log(loss=loss)
        is_due = step.index == bench.args.save_at and not mark.exists()
        if is_due and bench.job.is_primary:
            (bench.args.out / "saving").touch()
            if bench.args.waits:
                bench.hold()  # a hand-made save that takes its time
            mark.touch()
        bench.note(step, loss=loss)


KINDS: dict[str, Callable[[Bench], None]] = {
    kind.__name__: kind
    for kind in (metric, behind, waiting, two, adversarial, callable_form, zero, saving)
}


def main(job: trainmover.Job) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pace", type=float, default=0.0, help="seconds behind each step")
    parser.add_argument("--hold-at", type=int, default=-1, help="step behind which rank 0 waits")
    parser.add_argument("--save-at", type=int, default=4)
    parser.add_argument("--waits", action="store_true", help="saving lasts until a test says so")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    KINDS[args.kind](Bench(job, args))


if __name__ == "__main__":
    trainmover.run(main)
