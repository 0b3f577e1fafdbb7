"""Third-party rotary ops. To add a peer, write its factory below and add one row to ``PEERS``.

A factory imports the package and returns a function that rotates a :class:`Heads`, called as the package documents it.
Cosines and sines come from our tables (``heads.shared``), so that errors compare. A peer that is not installed is
skipped; one that fails on a case is reported in the row's ``failures``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterable
from typing import NamedTuple

from mrrope.benchmark.implementations import Contender, RotatedHeads, is_llama_style
from mrrope.benchmark.workloads import Case, Heads

Rotate = Callable[[Heads], RotatedHeads]


def liger() -> Rotate:
    """In place, q and k in one launch; needs the memory order of projections."""
    op = importlib.import_module("liger_kernel.ops.rope").rope_forward

    def rotate(heads: Heads) -> RotatedHeads:
        q, k, *_ = op(heads.by_head(heads.q), heads.by_head(heads.k), *heads.shared.cos_sin)
        return q, k

    return rotate


def flash_attn() -> Rotate:
    """In place, one launch for q and one for k; any strides."""
    op = importlib.import_module("flash_attn.ops.triton.rotary").apply_rotary

    def rotate(heads: Heads) -> RotatedHeads:
        half = heads.case.rotary_dim // 2
        cos, sin = (x[0, :, :half] for x in heads.shared.cos_sin)
        interleaved = heads.case.pairing == "interleaved"
        for x in (heads.q, heads.k):
            op(heads.by_token(x), cos, sin, interleaved=interleaved, inplace=True)
        return heads.rotated()

    return rotate


def flashinfer() -> Rotate:
    """In place, from a float32 cos/sin cache."""
    op = importlib.import_module("flashinfer.rope").apply_rope_with_cos_sin_cache_inplace
    return lambda heads: _rotate_by_cache(heads, op, heads.shared.cache)


def vllm() -> Rotate:
    """In place, from a cos/sin cache in the dtype of the heads."""
    op = importlib.import_module("vllm._custom_ops").rotary_embedding
    return lambda heads: _rotate_by_cache(heads, op, heads.shared.rounded_cache)


def _rotate_by_cache(heads: Heads, op: Callable[..., object], cache: object) -> RotatedHeads:
    """The calling convention that FlashInfer and vLLM share."""
    q, k = (heads.by_token(x)[0].flatten(1) for x in (heads.q, heads.k))
    op(heads.shared.positions, q, k, heads.case.head_dim, cache, heads.case.pairing == "halves")
    return heads.rotated()


def transformer_engine() -> Rotate:
    """Out of place, one launch for q and one for k, from float32 angles, without an attention factor."""
    op = importlib.import_module("transformer_engine.pytorch.attention.rope").apply_rotary_pos_emb

    def rotate(heads: Heads) -> RotatedHeads:
        angles = heads.shared.angles
        q, k = (op(heads.by_token(x), angles, tensor_format="bshd", fused=True) for x in (heads.q, heads.k))
        return q.transpose(1, 2), k.transpose(1, 2)

    return rotate


def _is_16_bit(case: Case) -> bool:
    return case.dtype in ("bfloat16", "float16") and not case.backward and case.layout != "bhsd"


class Peer(NamedTuple):
    """One row of ``PEERS``."""

    package: str
    """The name to import, which is also the name in the results."""
    make: Callable[[], Rotate]
    takes: Callable[[Case], bool]
    """Whether the peer supports a case."""


PEERS = (
    Peer("liger_kernel", liger, lambda case: is_llama_style(case) and case.layout == "projected"),
    Peer("flash_attn", flash_attn, lambda case: not case.backward),
    # Version 0.7.2 ends the run with an illegal memory access for head_dim 80; earlier versions refuse it.
    Peer("flashinfer", flashinfer, lambda case: _is_16_bit(case) and case.head_dim % 64 == 0),
    Peer("vllm", vllm, _is_16_bit),
    Peer("transformer_engine", transformer_engine, is_llama_style),
)


def versions(names: Iterable[str]) -> dict[str, str]:
    """Versions of the packages that have metadata; vendored copies have none."""
    distributions = importlib.metadata.packages_distributions()
    return {name: importlib.metadata.version(distributions[name][0]) for name in names if name in distributions}


def installed(device: str) -> list[Contender]:
    """The peers that can be imported; all of them need a GPU."""
    if device != "cuda":
        return []
    found = []
    for peer in PEERS:
        try:
            found.append(Contender(peer.package, peer.make(), peer.takes))
        except ImportError:
            continue
        except Exception as error:  # A package that was built for another torch raises what it likes.
            print(f"{peer.package} is installed but cannot be imported, and is left out: {error}", file=sys.stderr)
    return found
