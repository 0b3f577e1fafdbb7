"""Mixed-radix rotary position embeddings: frequency tables, fused ops, and patches for transformers models."""

from pathlib import Path

from mrrope.export.gguf import export_gguf
from mrrope.export.hf_config import export_config
from mrrope.hf.auto_scale.follower import expecting
from mrrope.hf.kernels_slot import register_kernels
from mrrope.hf.patch import is_patched, patch, patch_of, patched, unpatch
from mrrope.hf.registration import register_rope_types
from mrrope.ops.learnable_rotary import learnable_rotary
from mrrope.ops.mla_rotary import mla_rotary
from mrrope.ops.mla_rotary_and_cache import mla_rotary_and_cache_
from mrrope.ops.qk_norm_rotary import qk_norm_rotary, qk_norm_rotary_
from mrrope.ops.qk_norm_rotary_and_cache import qk_norm_rotary_and_cache_
from mrrope.ops.qkv_rotary import qkv_rotary
from mrrope.ops.rescale_cache import rescale_cache_
from mrrope.ops.rotary import rotary, rotary_
from mrrope.ops.rotary_and_cache import rotary_and_cache_
from mrrope.ops.rotary_cos_sin import rotary_cos_sin
from mrrope.tables.axis_tables import AxisTables
from mrrope.tables.frequency_table import FrequencyTable, frequency_table
from mrrope.tables.head_tables import HeadTables
from mrrope.tables.table_set import TableSet

__version__ = Path(__file__).with_name("VERSION").read_text().strip()

__all__ = [
    "AxisTables",
    "FrequencyTable",
    "HeadTables",
    "TableSet",
    "__version__",
    "expecting",
    "export_config",
    "export_gguf",
    "frequency_table",
    "is_patched",
    "learnable_rotary",
    "mla_rotary",
    "mla_rotary_and_cache_",
    "patch",
    "patch_of",
    "patched",
    "qk_norm_rotary",
    "qk_norm_rotary_",
    "qk_norm_rotary_and_cache_",
    "qkv_rotary",
    "register_kernels",
    "register_rope_types",
    "rescale_cache_",
    "rotary",
    "rotary_",
    "rotary_and_cache_",
    "rotary_cos_sin",
    "unpatch",
]
