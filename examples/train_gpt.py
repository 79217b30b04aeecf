"""A byte-level GPT on the Python standard library's sources: the script behind `make demo`.

    trainmover run --machines 4 --standby 1 examples/train_gpt.py --steps 200

The same file runs as `python examples/train_gpt.py` and under plain `torchrun`. The text is on
every machine that has Python, so there is nothing to download; machines of one job need the same
Python version, else they would read different text.

Shapes: B batch, T tokens in a window, C width of the model, H heads, V = 256 byte values.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import trainmover

BYTE_VALUES = 256
MLP_RATIO = 6
DROPOUT = 0.1

# ------------------------------------------------------------------------------------------ model


class Block(nn.Module):
    """Pre-LN attention and MLP, each with dropout on its way back into the stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, MLP_RATIO * width)
        self.narrow = nn.Linear(MLP_RATIO * width, width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x_btc: torch.Tensor) -> torch.Tensor:
        """[B, T, C] float -> [B, T, C] float."""
        batch, tokens, width = x_btc.shape
        split = self.query_key_value(self.norm_attention(x_btc)).view(
            batch, tokens, 3, self.heads, width // self.heads
        )
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=DROPOUT if self.training else 0.0, is_causal=True
        )
        mixed = mixed.transpose(1, 2).reshape(batch, tokens, width)
        x_btc = x_btc + self.dropout(self.project(mixed))
        hidden = functional.gelu(self.widen(self.norm_mlp(x_btc)))
        x_btc = x_btc + self.dropout(self.narrow(hidden))
        return x_btc


class ByteGPT(nn.Module):
    """Decoder over bytes; the output layer shares the embedding's weights."""

    def __init__(self, layers: int, width: int, heads: int, sequence: int) -> None:
        super().__init__()
        self.embed_byte = nn.Embedding(BYTE_VALUES, width)
        self.embed_place = nn.Embedding(sequence, width)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, tokens_bt: torch.Tensor, targets_bt: torch.Tensor) -> torch.Tensor:
        """[B, T] int64 twice -> mean cross-entropy, 0-dim float."""
        places = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)
        x_btc = self.dropout(self.embed_byte(tokens_bt) + self.embed_place(places))
        for block in self.blocks:
            x_btc = block(x_btc)
        logits_btv = functional.linear(self.norm(x_btc), self.embed_byte.weight)
        return functional.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())


# ------------------------------------------------------------------------------------------- data


def standard_library_text() -> bytes:
    """The standard library's own .py files, joined in the order of their relative paths."""
    folder = Path(sysconfig.get_path("stdlib"))
    by_name = {file.relative_to(folder).as_posix(): file for file in folder.rglob("*.py")}
    ours = {"site-packages", "dist-packages", "__pycache__"}
    names = sorted(name for name in by_name if not ours.intersection(name.split("/")))
    return b"".join(by_name[name].read_bytes() for name in names)


class Windows(Dataset[torch.Tensor]):
    """Non-overlapping windows of `sequence` bytes and the byte that follows."""

    def __init__(self, text: bytes, sequence: int) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.sequence = sequence

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.sequence

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self.sequence
        return self.text[start : start + self.sequence + 1].long()


def build_loader(args: argparse.Namespace) -> DataLoader[torch.Tensor]:
    """This rank's part of a shuffled epoch, read by worker processes."""
    windows = Windows(standard_library_text(), args.sequence)
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(
        windows, shuffle=True, seed=args.seed, drop_last=True
    )
    return DataLoader(
        windows,
        batch_size=args.batch,
        sampler=sampler,
        num_workers=args.workers,
        drop_last=True,
    )


# --------------------------------------------------------------------------------------- training


def build_model(args: argparse.Namespace, device_type: str) -> nn.Module:
    """The model as this job runs it: built alike on all ranks, then replicated or sharded."""
    torch.manual_seed(args.seed)
    model = ByteGPT(args.layers, args.width, args.heads, args.sequence).to(device_type)
    if args.compile:
        for block in model.blocks:
            block.compile()
    if args.parallel == "ddp":
        return DistributedDataParallel(model)
    ranks = dist.get_world_size()
    if args.parallel == "hsdp":
        if ranks % 2:
            raise SystemExit(f"--parallel hsdp needs an even number of ranks, there are {ranks}")
        mesh = init_device_mesh(device_type, (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh(device_type, (ranks,), mesh_dim_names=("shard",))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def build_schedule(
    optimizer: torch.optim.Optimizer, steps: int
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up over a tenth of the steps (at most 20), then a cosine down to a tenth."""
    warm_up = max(1, min(20, steps // 10))

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        share = (step - warm_up) / max(1, steps - warm_up)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, share)))

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class LossFile:
    """Appends each committed step's loss to a file, exactly once, whoever is primary.

    The last two losses are tracked state, noted before the gate. If the primary dies after the
    gate and before it has written, its successor finds the line missing and adds it.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.recent: list[list[Any]] = []
        self.written = -1

    def state_dict(self) -> dict[str, Any]:
        return {"recent": [list(entry) for entry in self.recent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.recent = [list(entry) for entry in state["recent"]]

    def note(self, step: int, loss: torch.Tensor) -> None:
        """Before the gate: from here on the value is part of the state of version step + 1."""
        self.recent = [*self.recent[-1:], [step, float(loss).hex()]]

    def write(self) -> None:
        """After the gate, on the primary: the lines that the file does not have yet."""
        if self.path is None:
            return
        step = self.recent[-1][0]
        if step == 0:
            self.path.write_text("")
        elif self.written != step - 1:
            self.written = self._last_step()
        with self.path.open("a", encoding="utf-8") as file:
            for index, value in self.recent:
                if index > self.written:
                    file.write(json.dumps({"step": index, "loss": value}) + "\n")
        self.written = step

    def _last_step(self) -> int:
        assert self.path is not None
        lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
        return int(json.loads(lines[-1])["step"]) if lines else -1


def mean_over_ranks(loss: torch.Tensor) -> torch.Tensor:
    """The loss of the global batch; a collective, so it stands before the optimizer's step."""
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def train(job: trainmover.Job, args: argparse.Namespace) -> None:
    """Build everything in ordinary PyTorch, then one `with step` per update."""
    model = build_model(args, job.device_type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.rate, weight_decay=0.1)
    scheduler = build_schedule(optimizer, args.steps)
    scaler = torch.amp.GradScaler(job.device_type, enabled=args.amp)
    losses = LossFile(args.losses)
    batches = job.batches(build_loader(args))
    job.seed(args.seed)
    job.track(model=model, optimizer=optimizer, scheduler=scheduler, scaler=scaler, losses=losses)
    for step in job.steps(args.steps):
        with step:
            window = next(batches).to(job.device_type, non_blocking=True)
            with torch.autocast(job.device_type, torch.bfloat16, enabled=args.amp):
                loss = model(window[:, :-1], window[:, 1:])
            scaler.scale(loss).backward()
            if args.clip > 0:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            mean = mean_over_ranks(loss)
            losses.note(step.index, mean)
            step.log(loss=mean)  # before the update: told even if rank 0 is lost right after it
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            if job.is_primary:
                step.after(losses.write)
    if args.final is not None:
        write_final(job, args, model, optimizer)


# ---------------------------------------------------------------------------------- final digests


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Parameters, buffers and the optimizer's tensors in a fixed order."""
    parameters = list(model.parameters())
    yield from parameters
    yield from model.buffers()
    for parameter in parameters:
        state = optimizer.state.get(parameter, {})
        yield from (state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor))


def digest_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """63 bits over the bytes of every tensor that this rank holds."""
    sha = hashlib.sha256()
    for tensor in tensors_of(model, optimizer):
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        flat = local.detach().cpu().contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().tobytes())
    return int.from_bytes(sha.digest()[:8], "big") >> 1


def write_final(
    job: trainmover.Job,
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
) -> None:
    """One digest per rank of all it holds, written by the primary."""
    own = torch.tensor([digest_of(model, optimizer)], device=job.device_type)
    all_digests = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_digests, own)
    if job.is_primary:
        final = {"steps": args.steps, "digests": [f"{int(d.item()):016x}" for d in all_digests]}
        args.final.write_text(json.dumps(final) + "\n", encoding="utf-8")


# ------------------------------------------------------------------------------------------ flags


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT.")
    parser.add_argument("--steps", type=int, default=200, help="updates in total")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=8, help="windows per rank and step")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--sequence", type=int, default=128, help="bytes per window")
    parser.add_argument("--workers", type=int, default=2, help="loader processes per rank")
    parser.add_argument("--rate", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--parallel", choices=("ddp", "fsdp2", "hsdp"), default="ddp")
    parser.add_argument("--compile", action="store_true", help="torch.compile for every block")
    parser.add_argument("--clip", type=float, default=0.0, help="gradient norm; 0 = no clipping")
    parser.add_argument("--amp", action="store_true", help="bfloat16 autocast and a GradScaler")
    # torchrun takes a script's --log for an abbreviation of its own flags, hence the second name.
    parser.add_argument("--losses", "--log", type=Path, help="JSON line per step: step, loss")
    parser.add_argument("--final", type=Path, help="JSON of the final digests")
    return parser.parse_args(arguments)


def main(job: trainmover.Job) -> None:
    train(job, parse_arguments())


if __name__ == "__main__":
    trainmover.run(main)
