"""Steps of a model in DDP that lays out its buckets otherwise, or is tracked otherwise."""

from __future__ import annotations

from step_bench import STEPS, Bench, loss_of  # beside this script, wherever it is run from
from torch import nn


def trained(bench: Bench, model: nn.Module, tracked: nn.Module, *, is_noted_late: bool) -> None:
    optimizer = bench.adam(model.parameters())
    batches = bench.batches()
    bench.track(model=tracked, optimizer=optimizer)
    for step in bench.job.steps(STEPS):
        with step:
            loss = loss_of(model, next(batches))
            loss.backward()
            step.log(loss=loss)
            if not is_noted_late:
                bench.note(loss)
            optimizer.step()
            optimizer.zero_grad()
            if is_noted_late:
                bench.note(loss)


def ddp_static(bench: Bench) -> None:
    """Laid out anew one iteration later."""
    model = bench.ddp(bench.net(), static_graph=True)
    trained(bench, model, model, is_noted_late=False)


def ddp_views(bench: Bench) -> None:
    """Gradients lie in the buckets."""
    model = bench.ddp(bench.net(), gradient_as_bucket_view=True)
    trained(bench, model, model, is_noted_late=False)


def ddp_inside(bench: Bench) -> None:
    """What is tracked is the model in DDP, not DDP."""
    model = bench.ddp(bench.net())
    trained(bench, model, model.module, is_noted_late=False)


def late_note(bench: Bench) -> None:
    """Behind the first update ranks differ for the first time in what they have noted there."""
    model = bench.ddp(bench.net())
    trained(bench, model, model, is_noted_late=True)
