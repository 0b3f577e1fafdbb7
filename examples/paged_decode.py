"""Decode with a paged cache: rotary_and_cache_ writes it, torch's SDPA reads the gathered blocks.

    python examples/paged_decode.py

Two sequences of different lengths decode in one batch, on random q, k and v. The result is compared with a plain loop
over unpaged keys.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention

import mrrope

Q_HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
BLOCK_SIZE, BLOCKS = 16, 32
PROMPTS, NEW_TOKENS = (37, 5), 8


class PagedCache:
    """Keys and values in blocks, with a block table per sequence."""

    def __init__(self, sequences: int) -> None:
        self.keys = torch.zeros(BLOCKS, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.values = torch.zeros_like(self.keys)
        self.block_tables: list[list[int]] = [[] for _ in range(sequences)]
        # Odd blocks are taken first: a cache in use has its blocks in no order.
        self.free_blocks = list(range(0, BLOCKS, 2)) + list(range(1, BLOCKS, 2))

    def slot(self, sequence: int, position: int) -> int:
        """Return the slot of a token; allocate its block where needed."""
        blocks = self.block_tables[sequence]
        if position // BLOCK_SIZE == len(blocks):
            blocks.append(self.free_blocks.pop())
        return blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE

    def gather(self, sequence: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values of a sequence, [heads, length, head_dim] each."""
        blocks = torch.tensor(self.block_tables[sequence])
        keys, values = (cache[blocks].flatten(0, 1)[:length].transpose(0, 1) for cache in (self.keys, self.values))
        return keys, values


def attend(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the attention of the last tokens, q of [tokens, heads, head_dim]."""
    tokens, length = q.shape[0], keys.shape[1]
    mask = torch.arange(length) <= torch.arange(length - tokens, length)[:, None]
    out = scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True
    )
    return out[0].transpose(0, 1)


def random_qkv(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return q, k and v as views of one packed projection, [tokens, heads, head_dim] each."""
    heads = torch.randn(tokens, Q_HEADS + 2 * KV_HEADS, HEAD_DIM)
    return heads[:, :Q_HEADS], heads[:, Q_HEADS:-KV_HEADS], heads[:, -KV_HEADS:]


def main() -> None:
    """Prefill two prompts, decode, and compare with the plain loop."""
    torch.manual_seed(0)
    table = mrrope.frequency_table("mrrope_pro", rotary_dim=HEAD_DIM, base=1e4, original_max_position=16, scale=4.0)
    cache = PagedCache(len(PROMPTS))
    history: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in PROMPTS]
    lengths = [0] * len(PROMPTS)
    largest_difference = 0.0

    for step in range(1 + NEW_TOKENS):
        # One packed call for all sequences: whole prompts first, then one token each.
        counts = list(PROMPTS) if step == 0 else [1] * len(PROMPTS)
        q, k, v = random_qkv(sum(counts))
        positions = torch.cat([torch.arange(start, start + n) for start, n in zip(lengths, counts, strict=True)])
        owners = [sequence for sequence, n in enumerate(counts) for _ in range(n)]
        slots = torch.tensor([cache.slot(owner, int(at)) for owner, at in zip(owners, positions, strict=True)])
        rotated = torch.empty_like(q)
        mrrope.rotary_and_cache_(
            q, k, v, positions, table, cache.keys, cache.values, slots, layout="thd", q_out=rotated
        )

        starts = [sum(counts[:sequence]) for sequence in range(len(counts))]
        for sequence, (start, count) in enumerate(zip(starts, counts, strict=True)):
            lengths[sequence] += count
            mine = slice(start, start + count)
            out = attend(rotated[mine], *cache.gather(sequence, lengths[sequence]))

            history[sequence].append((k[mine], v[mine]))
            keys, values = (torch.cat(parts) for parts in zip(*history[sequence], strict=True))
            plain_q, _ = mrrope.rotary(q[mine], None, positions[mine], table, layout="thd")
            plain_k, _ = mrrope.rotary(keys, None, torch.arange(len(keys)), table, layout="thd")
            expected = attend(plain_q, plain_k.transpose(0, 1), values.transpose(0, 1))
            largest_difference = max(largest_difference, (out - expected).abs().max().item())

    blocks = [len(blocks) for blocks in cache.block_tables]
    print(f"{lengths} tokens in {blocks} blocks, largest difference to the plain loop {largest_difference:.1e}")
    assert largest_difference < 1e-5


if __name__ == "__main__":
    main()
