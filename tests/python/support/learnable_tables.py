"""Tables with parameters, and tiny models that rotate by them."""

import math
import random

import torch
from byte_llama import byte_llama

import mrrope
from mrrope.calibration.learnable_tables import LearnableTables
from mrrope.tables.lookup import NativeRope

LAYERS, HEADS, ROTARY_DIM, NATIVE = 2, 2, 8, 32
QUERY_HEADS = 2 * HEADS


TRAINED = NativeRope(ROTARY_DIM, 1e4, NATIVE)


def table(method: str = "yarn", scale: float = 4.0, **options) -> mrrope.FrequencyTable:
    settings = {"rotary_dim": ROTARY_DIM, "base": 1e4, "original_max_position": NATIVE, "scale": scale}
    return mrrope.frequency_table(method, **settings, **options)


def random_set(
    seed: int, spread: float = 0.5, layers: int = LAYERS, heads: int = HEADS, query_heads: int | None = None
) -> mrrope.TableSet:
    """Return tables that differ in every layer and head, and with ``query_heads`` a factor for each."""
    rng = random.Random(seed)

    def one() -> mrrope.FrequencyTable:
        factors = [math.exp(rng.uniform(0, spread) + 0.4 * i) for i in range(ROTARY_DIM // 2)]
        return table("longrope", factors=factors, attention_factor=math.exp(rng.uniform(-spread, spread) / 4))

    def of_layer() -> mrrope.HeadTables:
        tables = [one() for _ in range(heads)]
        factors = query_heads and [math.exp(rng.uniform(-spread, spread)) for _ in range(query_heads)]
        return mrrope.HeadTables(tables, factors)

    return mrrope.TableSet([of_layer() for _ in range(layers)])


def tiny_llama(dtype: torch.dtype = torch.float64):
    return byte_llama(NATIVE, layers=LAYERS, heads=QUERY_HEADS, num_key_value_heads=HEADS, initializer_range=0.4).to(
        dtype
    )


def learnable(start=None, per: str = "head", **options) -> LearnableTables:
    shape = {"layers": LAYERS, "heads": HEADS} | options
    return LearnableTables(table() if start is None else start, TRAINED, per=per, **shape)
