"""Other people's rotary ops, those that are installed.

Each is called the way its own documentation does, with tables made from ours, so that errors can be compared.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable

from mrrope.benchmark.cases import Case, Heads
from mrrope.benchmark.contenders import Contender, Turned, is_whole_and_halved


def liger() -> Callable[[Heads], Turned]:
    """Writes over q and k where they are as projections give them."""
    rotate = importlib.import_module("liger_kernel.ops.rope").rope_forward

    def turn(heads: Heads) -> Turned:
        q, k, *_ = rotate(heads.by_head(heads.q), heads.by_head(heads.k), *heads.shared.cos_sin)
        return q, k

    return turn


def flash_attn() -> Callable[[Heads], Turned]:
    """In place, q and k in a launch each; any strides."""
    rotate = importlib.import_module("flash_attn.ops.triton.rotary").apply_rotary

    def turn(heads: Heads) -> Turned:
        half = heads.case.rotary_dim // 2
        cos, sin = (x[0, :, :half] for x in heads.shared.cos_sin)
        interleaved = heads.case.pairing == "interleaved"
        for x in (heads.q, heads.k):
            rotate(heads.by_token(x), cos, sin, interleaved=interleaved, inplace=True)
        return heads.turned()

    return turn


def flashinfer() -> Callable[[Heads], Turned]:
    """In place, from a cache of float32 cosines and sines."""
    rotate = importlib.import_module("flashinfer.rope").apply_rope_with_cos_sin_cache_inplace

    def turn(heads: Heads) -> Turned:
        q, k = (heads.by_token(x)[0].flatten(1) for x in (heads.q, heads.k))
        shared = heads.shared
        rotate(shared.positions, q, k, heads.case.head_dim, shared.cache, heads.case.pairing == "halves")
        return heads.turned()

    return turn


def vllm() -> Callable[[Heads], Turned]:
    """In place, from a cache of cosines and sines in the heads' dtype."""
    rotate = importlib.import_module("vllm._custom_ops").rotary_embedding

    def turn(heads: Heads) -> Turned:
        q, k = (heads.by_token(x)[0].flatten(1) for x in (heads.q, heads.k))
        shared = heads.shared
        rotate(shared.positions, q, k, heads.case.head_dim, shared.rounded_cache, heads.case.pairing == "halves")
        return heads.turned()

    return turn


def transformer_engine() -> Callable[[Heads], Turned]:
    """Out of place, q and k in a launch each, from float32 angles, without an attention factor."""
    rotate = importlib.import_module("transformer_engine.pytorch.attention.rope").apply_rotary_pos_emb

    def turn(heads: Heads) -> Turned:
        angles = heads.shared.angles
        q, k = (rotate(heads.by_token(x), angles, tensor_format="bshd", fused=True) for x in (heads.q, heads.k))
        return q.transpose(1, 2), k.transpose(1, 2)

    return turn


def _in_16_bits(case: Case) -> bool:
    return case.dtype in ("bfloat16", "float16") and not case.backward and case.layout != "bhsd"


PEERS: tuple[tuple[str, Callable[[], Callable[[Heads], Turned]], Callable[[Case], bool]], ...] = (
    ("liger_kernel", liger, lambda case: is_whole_and_halved(case) and case.layout == "projected"),
    ("flash_attn", flash_attn, lambda case: not case.backward),
    # With heads of 80, version 0.7.2 ends the run with an illegal access; earlier ones refused them.
    ("flashinfer", flashinfer, lambda case: _in_16_bits(case) and case.head_dim % 64 == 0),
    ("vllm", vllm, _in_16_bits),
    ("transformer_engine", transformer_engine, is_whole_and_halved),
)


def versions(names: Iterable[str]) -> dict[str, str]:
    """Of these packages, as far as they are known; a copy of some files has none."""
    distributions = importlib.metadata.packages_distributions()
    return {name: importlib.metadata.version(distributions[name][0]) for name in names if name in distributions}


def installed(device: str) -> list[Contender]:
    """Those that can be imported. They all need a GPU."""
    if device != "cuda":
        return []
    found = []
    for name, make, takes in PEERS:
        try:
            found.append(Contender(name, make(), takes))
        except ImportError:
            continue
        except Exception as error:  # compiled for another torch, say
            print(f"{name} is installed but cannot be imported, and is left out: {error}", file=sys.stderr)
    return found
