"""An update that is played again gives the same bits: kinds of optimizers, groups."""

from __future__ import annotations

import copy
from collections.abc import Callable

import msgspec
import pytest
import torch
from torch import nn

from trainmover.errors import StateMismatch, TrackError
from trainmover.protocol.messages import Version
from trainmover.state.increment import (
    Block,
    GradientLayout,
    IncrementHead,
    Player,
    decode_head,
    encode_head,
    head_of_update,
    why_not_replayable,
)

Make = Callable[[list[dict[str, object]]], torch.optim.Optimizer]

KINDS: dict[str, Make] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01),
    "amsgrad": lambda groups: torch.optim.Adam(groups, lr=0.01, amsgrad=True, weight_decay=0.1),
    "one-by-one": lambda groups: torch.optim.AdamW(groups, lr=0.01, foreach=False),
    "fused": lambda groups: torch.optim.AdamW(groups, lr=0.01, fused=True),
    "rate-in-a-tensor": lambda groups: torch.optim.Adam(groups, lr=torch.tensor(0.01)),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.01, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
    "nadam": lambda groups: torch.optim.NAdam(groups, lr=0.01),
    "rprop": lambda groups: torch.optim.Rprop(groups, lr=0.01),
}


def build(make: Make) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 2))
    model[3].weight.requires_grad_(False)
    groups: list[dict[str, object]] = [
        {"params": list(model[0].parameters())},
        {"params": [*model[2].parameters(), *model[3].parameters()], "lr": 0.03},
    ]
    return model, make(groups)


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    tensors = [*model.parameters()]
    for parameter in model.parameters():
        values = optimizer.state.get(parameter, {})
        tensors += [values[key] for key in sorted(values) if isinstance(values[key], torch.Tensor)]
    return [tensor.detach().contiguous().numpy().tobytes() for tensor in tensors]


def head(step: int) -> IncrementHead:
    return IncrementHead(owner_rank=0, base=Version(step=step), version=Version(step=step + 1))


@pytest.mark.parametrize("kind", KINDS)
def test_played_updates_give_the_same_bits(kind: str) -> None:
    """With two groups, a schedule, clipping and a parameter without gradient."""
    model, optimizer = build(KINDS[kind])
    other, again = build(KINDS[kind])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    layout = GradientLayout(optimizer)
    told = []
    for step in range(6):
        optimizer.zero_grad()
        model(torch.randn(4, 7)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        block = Block(layout.size_bytes)
        absent = layout.capture(block)
        update = head_of_update(head(step), optimizer, block, absent)
        told.append((decode_head(encode_head(update)), bytes(block.memory)))
        optimizer.step()
        schedule.step()
    player = Player("optimizer", again, GradientLayout(again))
    for update, data in told:
        assert update.absent == (4,)  # the frozen weight
        mine = Block(update.bulk_bytes)
        mine.memory[:] = data
        player.play(update, mine)
    assert bits(other, again) == bits(model, optimizer)
    assert all(parameter.grad is None for parameter in other.parameters())


def test_a_scaler_that_leaves_unscaling_to_the_optimizer() -> None:
    model, optimizer = build(KINDS["fused"])
    other, again = build(KINDS["fused"])
    layout, player = GradientLayout(optimizer), Player("o", again, GradientLayout(again))
    for step, found in enumerate((0.0, 1.0, 0.0)):
        optimizer.zero_grad()
        (model(torch.randn(4, 7)).square().mean() * 1024).backward()
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(1024.0), torch.tensor(found)  # type: ignore[attr-defined]
        block = Block(layout.size_bytes)
        update = head_of_update(head(step), optimizer, block, layout.capture(block))
        optimizer.step()
        player.play(update, block)
    assert bits(other, again) == bits(model, optimizer)
    assert getattr(again, "grad_scale", None) is None


def test_what_is_no_increment_of_this_optimizer_is_refused() -> None:
    model, optimizer = build(KINDS["sgd"])
    model(torch.randn(4, 7)).sum().backward()
    layout = GradientLayout(optimizer)
    block = Block(layout.size_bytes)
    update = head_of_update(head(0), optimizer, block, layout.capture(block))
    player = Player("optimizer", optimizer, layout)
    damaged = Block(layout.size_bytes)
    damaged.memory[:] = block.memory
    damaged.memory[5] ^= 1
    before = copy.deepcopy(bits(model, optimizer))
    with pytest.raises(StateMismatch, match="damaged"):
        player.play(update, damaged)
    with pytest.raises(StateMismatch, match="bytes"):
        player.play(msgspec.structs.replace(update, bulk_bytes=8), block)
    with pytest.raises(StateMismatch, match="head"):
        decode_head(b"\xc1")
    assert bits(model, optimizer) == before


def test_what_gradients_alone_do_not_explain_is_named() -> None:
    weights = [nn.Parameter(torch.ones(3))]
    assert "LBFGS" in why_not_replayable(torch.optim.LBFGS(weights))
    assert "sparse" in why_not_replayable(torch.optim.SparseAdam(weights))
    assert not why_not_replayable(torch.optim.AdamW(weights))
    table = nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    layout = GradientLayout(torch.optim.SGD(table.parameters(), lr=0.1))
    with pytest.raises(TrackError, match="parameter 0"):
        layout.capture(Block(layout.size_bytes))


def test_another_parameter_is_another_layout() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(3))], lr=0.1)
    layout = GradientLayout(optimizer)
    assert layout.fits(optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    assert not layout.fits(optimizer)
