"""mrrope's rotation by cosines and sines: a layer for the slot ``rotary_pos_emb`` of transformers, and the op."""

from . import layers
from ._ops import ops

rotary_cos_sin = ops.rotary_cos_sin

__all__ = ["layers", "rotary_cos_sin"]
