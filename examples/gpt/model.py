"""A byte-level GPT, whole or as the part of it that one stage of a pipeline holds.

Decides the arithmetic of one rank; how parts are spread over ranks is decided in `layouts`.

Shapes: B batch, T tokens in a window, C width of the model, V = 256 byte values.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

BYTE_VALUES = 256
MLP_RATIO = 6
DROPOUT = 0.1


class Block(nn.Module):
    """Pre-LN attention and MLP, each with dropout on its way back into the stream.

    `is_split_by_head`: each head's query, key and value rows lie together, so that a rank which
    holds some of the rows holds whole heads.
    """

    def __init__(self, width: int, heads: int, *, is_split_by_head: bool = False) -> None:
        super().__init__()
        self.head_width = width // heads
        self.is_split_by_head = is_split_by_head
        self.norm_attention = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm_mlp = nn.LayerNorm(width)
        self.widen = nn.Linear(width, MLP_RATIO * width)
        self.narrow = nn.Linear(MLP_RATIO * width, width)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, x_btc: torch.Tensor) -> torch.Tensor:
        """[B, T, C] float -> [B, T, C] float."""
        x_btc = x_btc + self.dropout(self.attend(self.norm_attention(x_btc)))
        x_btc = x_btc + self.dropout(self.widen_and_narrow(self.norm_mlp(x_btc)))
        return x_btc

    def attend(self, x_btc: torch.Tensor) -> torch.Tensor:
        """Causal attention of the heads that this rank holds."""
        rows = self.query_key_value(x_btc)
        batch, tokens, held = rows.shape
        heads = held // (3 * self.head_width)
        if self.is_split_by_head:
            split = rows.view(batch, tokens, heads, 3, self.head_width).permute(3, 0, 2, 1, 4)
        else:
            split = rows.view(batch, tokens, 3, heads, self.head_width).permute(2, 0, 3, 1, 4)
        query, key, value = split
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=DROPOUT if self.training else 0.0, is_causal=True
        )
        result: torch.Tensor = self.project(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        return result

    def widen_and_narrow(self, x_btc: torch.Tensor) -> torch.Tensor:
        """The block's MLP."""
        result: torch.Tensor = self.narrow(functional.gelu(self.widen(x_btc)))
        return result


def initialise(module: nn.Module) -> None:
    """GPT's usual start values."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def loss_of(logits_btv: torch.Tensor, targets_bt: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, 0-dim float."""
    return functional.cross_entropy(logits_btv.flatten(0, 1), targets_bt.flatten())


class ByteGPT(nn.Module):
    """Decoder over bytes; the output layer shares the embedding's weights."""

    def __init__(self, blocks: list[nn.Module], width: int, sequence: int) -> None:
        super().__init__()
        self.embed_byte = nn.Embedding(BYTE_VALUES, width)
        self.embed_place = nn.Embedding(sequence, width)
        self.dropout = nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        self.apply(initialise)

    def forward(self, tokens_bt: torch.Tensor, targets_bt: torch.Tensor) -> torch.Tensor:
        """[B, T] int64 twice -> mean cross-entropy, 0-dim float."""
        places = torch.arange(tokens_bt.shape[1], device=tokens_bt.device)
        x_btc = self.dropout(self.embed_byte(tokens_bt) + self.embed_place(places))
        for block in self.blocks:
            x_btc = block(x_btc)
        return loss_of(functional.linear(self.norm(x_btc), self.embed_byte.weight), targets_bt)


class Stage(nn.Module):
    """Some blocks of the model; the first stage embeds, the last one predicts.

    Blocks keep their number in the whole model as name: two stages of equal shape must not hold
    parameters of equal names, or they would pass for replicas of each other.
    """

    def __init__(self, whole: ByteGPT, numbers: range) -> None:
        super().__init__()
        is_first, is_last = numbers.start == 0, numbers.stop == len(whole.blocks)
        self.embed_byte = whole.embed_byte if is_first else None
        self.embed_place = whole.embed_place if is_first else None
        self.dropout = whole.dropout
        self.blocks = nn.ModuleDict({str(number): whole.blocks[number] for number in numbers})
        self.norm = whole.norm if is_last else None
        self.predict = nn.Linear(whole.norm.normalized_shape[0], BYTE_VALUES, bias=False)
        # A weight of two stages would be a weight of two ranks: the output layer has its own.
        self.predict.weight.data.copy_(whole.embed_byte.weight)
        if not is_last:
            del self.predict

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """First stage: [B, T] int64, else [B, T, C]; last stage gives [B, T, V], else [B, T, C]."""
        if self.embed_byte is not None and self.embed_place is not None:
            places = torch.arange(x.shape[1], device=x.device)
            x = self.dropout(self.embed_byte(x) + self.embed_place(places))
        for block in self.blocks.values():
            x = block(x)
        if self.norm is not None:
            x = self.predict(self.norm(x))
        return x
