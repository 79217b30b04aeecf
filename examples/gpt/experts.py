"""A mixture of experts: each token goes to the rank that holds its expert, and comes back.

How many tokens an expert gets depends on the data, so the sizes of the exchange do as well: ranks
tell each other the counts first.

Shapes: N tokens of a rank, M tokens that arrive, C width, E experts in all.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single
from torch.nn import functional

from gpt.model import MLP_RATIO, Block


class Expert(nn.Module):
    """A small MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.widen = nn.Linear(width, MLP_RATIO * width // 2)
        self.narrow = nn.Linear(MLP_RATIO * width // 2, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[any, C] -> [any, C]."""
        result: torch.Tensor = self.narrow(functional.gelu(self.widen(x)))
        return result


class Experts(nn.Module):
    """Top-1 routing over all experts of `group`, some of which are here.

    An expert keeps its number as name, so that no two ranks of the group hold equal names.
    """

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.count = count
        self.route = nn.Linear(width, count, bias=False)
        self.held = nn.ModuleDict({str(number): Expert(width) for number in range(count)})
        self.group: dist.ProcessGroup | None = None

    def keep_own(self, group: dist.ProcessGroup) -> None:
        """Keep this rank's part of the experts, which all ranks have built alike."""
        self.group = group
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        each = self.count // size
        for number in range(self.count):
            if number // each != rank:
                del self.held[str(number)]

    def forward(self, x_btc: torch.Tensor) -> torch.Tensor:
        """[B, T, C] -> [B, T, C]."""
        x_nc = x_btc.reshape(-1, x_btc.shape[-1])
        weight_n, expert_n = functional.softmax(self.route(x_nc), dim=-1).max(dim=-1)
        result: torch.Tensor = self.at_experts(x_nc, expert_n)
        return (result * weight_n[:, None]).view(x_btc.shape)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def at_experts(self, x_nc: torch.Tensor, expert_n: torch.Tensor) -> torch.Tensor:
        """Each row through its expert, wherever that is."""
        assert self.group is not None
        order = expert_n.argsort(stable=True)
        sent = expert_n.bincount(minlength=self.count).view(dist.get_world_size(self.group), -1)
        coming = torch.empty_like(sent)
        dist.all_to_all_single(coming, sent, group=self.group)
        there, here = sent.sum(1).tolist(), coming.sum(1).tolist()
        arrived = all_to_all_single(
            x_nc.new_empty(sum(here), x_nc.shape[1]), x_nc[order], here, there, self.group
        )
        which = torch.arange(coming.shape[1]).repeat(coming.shape[0])
        done = self._through(arrived, which.repeat_interleave(coming.flatten()))
        back = all_to_all_single(torch.empty_like(x_nc), done, there, here, self.group)
        return torch.zeros_like(x_nc).index_copy(0, order, back)

    def _through(self, x_mc: torch.Tensor, which_m: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(x_mc)
        for index, expert in enumerate(self.held.values()):
            rows = (which_m == index).nonzero().flatten()
            result = result.index_copy(0, rows, expert(x_mc[rows]))
        return result


class ExpertBlock(Block):
    """A block whose MLP is a mixture of experts."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__(width, heads)
        del self.widen, self.narrow
        self.experts = Experts(width, experts)

    def widen_and_narrow(self, x_btc: torch.Tensor) -> torch.Tensor:
        """[B, T, C] -> [B, T, C], each token through one expert."""
        result: torch.Tensor = self.experts(x_btc)
        return result
