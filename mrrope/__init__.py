"""Mixed-radix rotary position embeddings: exact frequency tables, fused ops for them, and models that use them."""

from pathlib import Path

from mrrope.cache_writing import rotary_and_cache_
from mrrope.cached_keys import rescale_cache_
from mrrope.export import export_config
from mrrope.following import expecting
from mrrope.gguf_export import export_gguf
from mrrope.normed_rotation import qk_norm_rotary, qk_norm_rotary_
from mrrope.patching import is_patched, patch, patched, unpatch
from mrrope.projection import deinterleave_heads, interleave_heads, pack_qkv, qkv_rotary, unpack_qkv
from mrrope.rope_types import register_on_import, register_rope_types
from mrrope.rotation import rotary, rotary_
from mrrope.tables import METHODS, FrequencyTable, frequency_table

__version__ = Path(__file__).with_name("VERSION").read_text().strip()

register_on_import()

__all__ = [
    "METHODS",
    "FrequencyTable",
    "__version__",
    "deinterleave_heads",
    "expecting",
    "export_config",
    "export_gguf",
    "frequency_table",
    "interleave_heads",
    "is_patched",
    "pack_qkv",
    "patch",
    "patched",
    "qk_norm_rotary",
    "qk_norm_rotary_",
    "qkv_rotary",
    "register_rope_types",
    "rescale_cache_",
    "rotary",
    "rotary_",
    "rotary_and_cache_",
    "unpack_qkv",
    "unpatch",
]
