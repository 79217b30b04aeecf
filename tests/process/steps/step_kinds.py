"""Steps of many kinds, in one script: `step_kinds.py KIND`; tests interrupt them everywhere.

Every kind logs its loss, keeps all losses of the rank in a tracked value (which must be undone
with its step), and in the end writes what each rank has, so that all ranks are compared.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import step_closures
import step_layouts
import torch
import torch.distributed as dist
from step_bench import STEPS, Bench, loss_of  # beside this script, wherever it is run from
from torch import nn

import trainmover

Kind = Callable[[Bench], None]

# ------------------------------------------------------------------ how the model is spread


def train(bench: Bench, model: nn.Module) -> None:
    optimizer = bench.adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    batches = bench.batches()
    bench.track(model=model, optimizer=optimizer, scheduler=scheduler)
    for step in bench.job.steps(STEPS):
        with step:
            loss = loss_of(model, next(batches))
            loss.backward()
            step.log(loss=loss)
            bench.note(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            bench.behind_gate(step.index)


def ddp(bench: Bench) -> None:
    train(bench, bench.ddp(bench.net()))


def late_tail(bench: Bench) -> None:
    """Rank 0 is still behind the gate of step 0 when another is struck in step 1."""
    bench.behind_gate = lambda step: time.sleep(0.5 * (step == 0 == dist.get_rank()))
    ddp(bench)


def batch_norm(bench: Bench) -> None:
    train(bench, bench.ddp(bench.net(has_norm=True)))


def fsdp2(bench: Bench) -> None:
    train(bench, bench.sharded(bench.net()))


def hsdp(bench: Bench) -> None:
    train(bench, bench.sharded(bench.net(), dimensions=2))


def ddp_compiled(bench: Bench) -> None:
    train(bench, torch.compile(bench.ddp(bench.net(), None), backend="eager"))


def fsdp2_compiled(bench: Bench) -> None:
    net = bench.net()
    bench.sharded(net)
    for index in (0, 3):
        net[index].compile(backend="eager")
    train(bench, net)


# ------------------------------------------------------------------ what a step does


def scaled(bench: Bench, *, does_clip: bool) -> None:
    model = bench.ddp(bench.net())
    optimizer = bench.adam(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    batches = bench.batches()
    bench.track(model=model, optimizer=optimizer, scaler=scaler)
    for step in bench.job.steps(STEPS):
        with step:
            loss = loss_of(model, next(batches))
            factor = math.inf if step.index == 2 and dist.get_rank() == 0 else 1.0
            scaler.scale(loss * factor).backward()
            if does_clip:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            step.log(loss=loss, scale=scaler.get_scale())
            bench.note(loss)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def scaler(bench: Bench) -> None:
    scaled(bench, does_clip=False)


def scaler_clip(bench: Bench) -> None:
    scaled(bench, does_clip=True)


def clip(bench: Bench) -> None:
    model = bench.sharded(bench.net())
    optimizer = bench.adam(model.parameters())
    batches = bench.batches()
    bench.track(model=model, optimizer=optimizer)
    for step in bench.job.steps(STEPS):
        with step:
            loss = loss_of(model, next(batches))
            loss.backward()
            norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            step.log(loss=loss, norm=norm.full_tensor())
            bench.note(loss)
            optimizer.step()
            optimizer.zero_grad()


def accumulation(bench: Bench) -> None:
    model: Any = bench.ddp(bench.net())
    optimizer = bench.adam(model.parameters())
    batches = bench.batches()
    bench.track(model=model, optimizer=optimizer)
    for step in bench.job.steps(STEPS):
        with step:
            total = 0.0
            for micro in range(3):
                model.require_backward_grad_sync = micro == 2
                loss = loss_of(model, next(batches)) / 3
                loss.backward()
                total += loss.item()
            step.log(loss=total)
            bench.note(total)
            optimizer.step()
            optimizer.zero_grad()


def accumulate(model: Any, batches: Any, count: int) -> None:
    """Backward passes of a third each, without communication."""
    with model.no_sync():
        for _ in range(count):
            (loss_of(model, next(batches)) / 3).backward()


def accumulation_no_sync(bench: Bench) -> None:
    model: Any = bench.ddp(bench.net())
    optimizer = bench.adam(model.parameters())
    batches = bench.batches()
    bench.track(model=model, optimizer=optimizer)
    for step in bench.job.steps(STEPS):
        with step:
            accumulate(model, batches, 2)
            loss = loss_of(model, next(batches)) / 3
            loss.backward()
            step.log(loss=loss)
            bench.note(loss)
            optimizer.step()
            optimizer.zero_grad()


def two_optimizers(bench: Bench) -> None:
    net = bench.net()
    model = bench.ddp(net)
    first, second = bench.adam(net[0].parameters()), bench.adam(net[3:].parameters())
    batches = bench.batches()
    bench.track(model=model, first=first, second=second)
    for step in bench.job.steps(STEPS):
        with step:
            loss = loss_of(model, next(batches))
            loss.backward()
            step.log(loss=loss)
            bench.note(loss)
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()


def ema(bench: Bench) -> None:
    net = bench.net()
    model = bench.ddp(net)
    optimizer = bench.adam(model.parameters())
    average = torch.optim.swa_utils.AveragedModel(
        net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    bench.nets.append(average)
    batches = bench.batches()
    bench.track(model=model, optimizer=optimizer, average=average)
    for step in bench.job.steps(STEPS):
        with step:
            loss = loss_of(model, next(batches))
            loss.backward()
            step.log(loss=loss)
            bench.note(loss)
            optimizer.step()
            average.update_parameters(net)
            optimizer.zero_grad()


def no_update(bench: Bench) -> None:
    model = bench.ddp(bench.net())
    optimizer = bench.adam(model.parameters())
    batches = bench.batches()
    bench.track(model=model, optimizer=optimizer)
    for step in bench.job.steps(STEPS):
        with step:
            loss = loss_of(model, next(batches))
            loss.backward()
            step.log(loss=loss)
            bench.note(loss)
            if step.index % 3 != 1:
                optimizer.step()
                optimizer.zero_grad()


def callable_form(bench: Bench) -> None:
    model = bench.ddp(bench.net())
    optimizer = bench.adam(model.parameters())
    batches = bench.batches()
    bench.track(model=model, optimizer=optimizer)

    def update(step: Any, batch: Any) -> torch.Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        step.log(loss=loss)
        bench.note(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for step in bench.job.steps(STEPS):
        loss = step.run(update, step, next(batches))
        if loss is None:
            assert not step.committed  # all ranks have gone back to an earlier step
        elif bench.does_reduce_behind:
            dist.all_reduce(loss)


def callable_late_tail(bench: Bench) -> None:
    """A collective behind the gate and behind `step.run`."""
    bench.does_reduce_behind = True
    callable_form(bench)


def gan(bench: Bench) -> None:
    generator, critic = bench.ddp(bench.net(inputs=4)), bench.ddp(bench.net(inputs=1))
    of_generator, of_critic = bench.adam(generator.parameters()), bench.adam(critic.parameters())
    batches = bench.batches()
    bench.track(g=generator, d=critic, og=of_generator, od=of_critic)

    def criticise(step: Any) -> None:
        _, real = next(batches)
        made = generator(torch.randn(len(real), 4)).detach()
        loss = (critic(made) - critic(real)).mean()
        loss.backward()
        step.log(critic=loss)
        bench.note(loss)
        of_critic.step()
        of_critic.zero_grad()

    def generate(step: Any) -> None:
        loss = -critic(generator(torch.randn(4, 4))).mean()
        loss.backward()
        step.log(generator=loss)
        bench.note(loss)
        of_generator.step()
        of_generator.zero_grad()
        of_critic.zero_grad()

    for step in bench.job.steps(STEPS):
        step.run("d", criticise, step)
        step.run("g", generate, step)


# ------------------------------------------------------------------ around the step


def evaluation(bench: Bench) -> None:
    net = bench.net()
    model = bench.ddp(net)
    optimizer = bench.adam(model.parameters())
    batches = bench.batches()
    bench.track(model=model, optimizer=optimizer)

    @bench.job.every(2)
    def evaluate() -> None:
        bench.before_evaluation()
        net.eval()
        with torch.no_grad():
            for _ in range(2):
                value = net(torch.randn(4, 8)).sum()
                dist.all_reduce(value)
                bench.note(value)
        net.train()

    for step in bench.job.steps(STEPS):
        with step:
            loss = loss_of(model, next(batches))
            loss.backward()
            step.log(loss=loss)
            bench.note(loss)
            optimizer.step()
            optimizer.zero_grad()
            bench.behind_gate(step.index)


def late_evaluation(bench: Bench) -> None:
    """Rank 0 is late behind each gate, and again in front of the evaluation's collectives."""
    is_late = dist.get_rank() == 0
    bench.behind_gate = lambda _: time.sleep(0.3 * is_late)
    bench.before_evaluation = lambda: time.sleep(0.3 * is_late)
    evaluation(bench)


def tail_collective(bench: Bench) -> None:
    model = bench.ddp(bench.net())
    optimizer = bench.adam(model.parameters())
    batches = bench.batches()
    bench.track(model=model, optimizer=optimizer)
    for step in bench.job.steps(STEPS):
        with step:
            loss = loss_of(model, next(batches))
            loss.backward()
            step.log(loss=loss)
            bench.note(loss)
            optimizer.step()
            optimizer.zero_grad()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            step.log(mean=mean / dist.get_world_size())


def log_mean(bench: Bench) -> None:
    model = bench.ddp(bench.net())
    optimizer = bench.adam(model.parameters())
    batches = bench.batches()
    bench.track(model=model, optimizer=optimizer)
    for step in bench.job.steps(STEPS):
        with step:
            loss = loss_of(model, next(batches))
            loss.backward()
            step.log(loss=loss)
            step.log(mean=loss, reduce="mean")
            step.log(most=loss, reduce="max")
            bench.note(loss)
            optimizer.step()
            optimizer.zero_grad()


def drawn_batches(bench: Bench) -> None:
    model = bench.ddp(bench.net())
    optimizer = bench.adam(model.parameters())

    def draw() -> Any:
        x = torch.randn(4, 8) * random.random()
        return x, x.sum(1, keepdim=True)

    batches = bench.job.batches(draw, prefetch=1)
    bench.job.seed(7)
    bench.track(model=model, optimizer=optimizer)
    for step in bench.job.steps(STEPS):
        with step:
            loss = sum(loss_of(model, next(batches)) for _ in range(2))
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            step.log(loss=loss)
            bench.note(loss)
            optimizer.step()
            optimizer.zero_grad()


def loader_workers(bench: Bench) -> None:
    model = bench.ddp(bench.net())
    optimizer = bench.adam(model.parameters())
    batches = bench.batches(workers=2)
    bench.track(model=model, optimizer=optimizer)
    for step in bench.job.steps(STEPS):
        with step:
            loss = loss_of(model, next(batches))
            loss.backward()
            step.log(loss=loss)
            bench.note(loss)
            optimizer.step()
            optimizer.zero_grad()


# ------------------------------------------------------------------ what can't run out


def agreed(bench: Bench, count: Callable[[], float]) -> None:
    model = bench.ddp(bench.net())
    optimizer = bench.adam(model.parameters())
    batches = bench.batches()
    bench.track(model=model, optimizer=optimizer)
    for step in bench.job.steps(STEPS):
        with step:
            loss = loss_of(model, next(batches)) / count()
            assert torch.isfinite(loss), "the loss is not finite"
            loss.backward()
            step.log(loss=loss)
            bench.note(loss)
            optimizer.step()
            optimizer.zero_grad()


def loops_until_agreed(bench: Bench) -> None:
    """All ranks go on until all say so: own input as an answer never ends it."""

    def count() -> float:
        rounds = 0
        while True:
            rounds += 1
            done = torch.tensor(float(rounds >= 2))
            dist.all_reduce(done)
            if done.item() == dist.get_world_size():
                return rounds

    agreed(bench, count)


def asserts_finite(bench: Bench) -> None:
    """Own input as an answer makes the loss infinite."""

    def count() -> float:
        ranks = torch.ones(())
        dist.all_reduce(ranks)
        return ranks.item() - 1.0

    agreed(bench, count)


def main(job: trainmover.Job) -> None:
    bench = Bench(job)
    kind: Kind = (vars(step_closures) | vars(step_layouts) | globals())[sys.argv[1]]
    kind(bench)
    bench.finish()


if __name__ == "__main__":
    trainmover.run(main)
