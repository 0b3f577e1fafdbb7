"""Tiny models with several positions per token (M-RoPE), and positions of texts with images."""

from collections.abc import Sequence

import tiny_models
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VISION_LANGUAGE = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "glm4v",
    "glm4v_moe",
    "glm_ocr",
    "paddleocr_vl",
    "ernie4_5_vl_moe",
    "qwen3_5",
)
TEXT = ("qwen3_5_text", "qwen4_exp_text", "cohere_compass_text")
"""Causal models. Qwen3.5 and Qwen4 have linear-attention layers and interleaved sections. Qwen3.5 rotates partially;
Qwen4 selects tokens of cosines and sines."""
FAMILIES = (*VISION_LANGUAGE, *TEXT)


def mrope_model(family: str, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a tiny random model that generates, on the CPU, in eval mode."""
    if family in TEXT:
        return tiny_models.tiny_model(family, dtype=dtype)
    config = tiny_models.tiny_config(CONFIG_MAPPING[family](), {})
    text = config.get_text_config()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    pairs = int(head_dim * text.rope_parameters.get("partial_rotary_factor", 1.0)) // 2
    # Frame, row, column; Ernie's are of row, column, frame, with as many rows as columns, in an order of its own.
    sections = [3, 3, pairs - 6] if family.startswith("ernie") else [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    text.rope_parameters = {**text.rope_parameters, "mrope_section": sections}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config, dtype=dtype).eval()


def positions_of(parts: Sequence[int | tuple[int, int]]) -> Tensor:
    """Return the positions ``[3, 1, tokens]`` of texts of so many tokens and images of (rows, columns), as Qwen-VL's.

    An image advances the positions by its longer side.
    """
    found, start = [], 0
    for part in parts:
        if isinstance(part, int):
            found.append(start + torch.arange(part).expand(3, -1))
            start += part
        else:
            rows, columns = torch.meshgrid(*map(torch.arange, part), indexing="ij")
            found.append(start + torch.stack([torch.zeros_like(rows), rows, columns]).flatten(1))
            start += max(part)
    return torch.cat(found, dim=1)[:, None]
