"""A stock model whose own apply functions rotate head by head, with cosines and sines in float64 from tables per layer.

The independent reference of models patched with tables per layer and head. Nothing of the package's arithmetic is used:
angles are positions times ``inv_freq``, in float64.
"""

import contextlib
import importlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

import mrrope

HALVES = "halves"
INTERLEAVED = "interleaved"
COMPLEX = "complex"
ONE_HALF = "one half"


def random_table(rng: random.Random, rotary_dim: int, base: float, length: float, scale: float = 4.0) -> Any:
    """Return a table with random cumulative scales from 1 to ``scale`` and a random attention factor."""
    factors = sorted(rng.uniform(1.0, scale) for _ in range(rotary_dim // 2))
    return mrrope.frequency_table(
        "longrope",
        rotary_dim=rotary_dim,
        base=base,
        original_max_position=length,
        scale=scale,
        factors=factors,
        attention_factor=rng.uniform(0.7, 1.3),
    )


def random_set(seed: int, layers: int, heads: int, *settings: Any) -> mrrope.TableSet:
    """Return a set of random tables. One layer in the middle of three or more has one table for all its heads."""
    rng = random.Random(seed)
    entries: list[Any] = []
    for layer in range(layers):
        tables = [random_table(rng, *settings) for _ in range(heads)]
        entries.append(tables[0] if layer == 1 and layers > 2 else mrrope.HeadTables(tables))
    return mrrope.TableSet(entries)


def random_factors(rng: random.Random, query_heads: int) -> list[float]:
    """Return random factors of query heads, from a third to three."""
    return [3.0 ** rng.uniform(-1.0, 1.0) for _ in range(query_heads)]


def with_factors(tables: Any, query_heads: int, seed: int = 0) -> Any:
    """Return tables with random factors of query heads; of a set, with others in every layer but the first."""
    rng = random.Random(seed)
    if isinstance(tables, mrrope.TableSet):
        layers = [with_factors(tables[i], query_heads, seed + i) for i in range(1, len(tables))]
        return mrrope.TableSet([tables[0], *layers])
    rows = [tables] if isinstance(tables, mrrope.FrequencyTable) else tables
    return mrrope.HeadTables(rows, random_factors(rng, query_heads))


def cosines_and_sines(angles: Tensor, factor: float, form: str) -> tuple[Tensor, ...]:
    """Return the embedding of a modeling file from the angles of all pairs, ``[batch, tokens, pairs]``."""
    if form == COMPLEX:
        return (factor * torch.polar(torch.ones_like(angles), angles),)
    components = {
        HALVES: torch.cat([angles, angles], -1),
        INTERLEAVED: angles.repeat_interleave(2, -1),
        ONE_HALF: angles,
    }[form]
    return factor * components.cos(), factor * components.sin()


@contextlib.contextmanager
def head_by_head(
    model: nn.Module,
    tables_of: Callable[[int], Any],
    form: str = HALVES,
    name: str = "apply_rotary_pos_emb",
    rows: list[int] | None = None,
    rotated_pairs: Tensor | float = 1.0,
) -> Iterator[list[int]]:
    """Make a stock model rotate by tables per layer and head.

    Args:
        model: a stock model.
        tables_of: from a layer to its table, head tables, or None where the layer keeps the model's own.
        form: the form of the embedding in the modeling file.
        name: the name of the modeling file's apply function.
        rows: M-RoPE: the row of positions that rotates each pair.
        rotated_pairs: 1 for the pairs that the model rotates, 0 for others.

    Yields:
        The layers of all calls so far.
    """
    module = importlib.import_module(type(model).__module__)
    original = getattr(module, name)
    now: dict[str, Any] = {}
    calls: list[int] = []

    def remember_layer(attention: Any, args: Any) -> None:
        now["layer"] = attention.layer_idx

    def remember_positions(rotary: Any, args: Any, kwargs: Any) -> None:
        now["positions"] = kwargs["position_ids"] if "position_ids" in kwargs else args[1]

    def rotate(*args: Any, **options: Any) -> Any:
        tables = tables_of(now["layer"])
        if tables is None:
            return original(*args, **options)
        calls.append(now["layer"])
        query_factors = tables.query_factors
        tables = [tables] if isinstance(tables, mrrope.FrequencyTable) else list(tables)
        embeddings = 1 if form == COMPLEX else 2
        heads = args[:-embeddings]
        positions = now["positions"].double()
        at = positions[..., None] if rows is None else positions[rows].permute(1, 2, 0)
        is_bshd = heads[0].shape[1] == positions.shape[-1] if form == COMPLEX else options.get("unsqueeze_dim", 1) == 2
        heads_dim = 2 if is_bshd else 1
        chunks = [x.chunk(len(tables), heads_dim) for x in heads]
        parts = []
        for table, *group in zip(tables, *chunks, strict=True):
            embedding = cosines_and_sines(at * table.inv_freq * rotated_pairs, table.attention_factor, form)
            if form != COMPLEX:
                embedding = tuple(part.to(heads[0].dtype) for part in embedding)
            rotated = original(*group, *embedding, **options)
            parts.append(rotated if isinstance(rotated, tuple) else (rotated,))
        joined = tuple(torch.cat(side, heads_dim) for side in zip(*parts, strict=True))
        if query_factors is not None:
            shape = [-1 if dim == heads_dim else 1 for dim in range(joined[0].dim())]
            joined[0][..., : tables[0].rotary_dim] *= torch.tensor(query_factors, dtype=torch.float64).view(shape)
        return joined if len(heads) > 1 else joined[0]

    with contextlib.ExitStack() as stack:
        for part in model.modules():
            if isinstance(getattr(part, "layer_idx", None), int):
                stack.callback(part.register_forward_pre_hook(remember_layer).remove)
            if type(part).__name__.endswith("RotaryEmbedding"):
                stack.callback(part.register_forward_pre_hook(remember_positions, with_kwargs=True).remove)
        stack.callback(setattr, module, name, original)
        setattr(module, name, rotate)
        yield calls
