"""Copies, pickles and checkpoints of patched models."""

import copy
import importlib
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mrrope

pytest.importorskip("transformers")

from patched_models import (
    IN_A_FRESH_PROCESS,
    logits,
    ready,
)
from safetensors.torch import load_file
from tiny_models import tiny_model, tokens
from transformers import PreTrainedModel
from transformers.models.llama import modeling_llama

pytestmark = pytest.mark.usefixtures("quick_collection", "stock")


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
@pytest.mark.parametrize("family", ["llama", "llama4_text", "gemma3_text"])
def test_copies_stand_on_their_own(family: str, how: Callable[[Any], Any]) -> None:
    model = tiny_model(family)
    plain = logits(model)
    found = logits(mrrope.patch(model, "mrrope_pro", scale=4.0))
    clone = how(model)
    assert torch.equal(logits(clone), found)
    assert torch.equal(logits(mrrope.unpatch(model)), plain)
    assert torch.equal(logits(clone), found), "unpatching the one must not touch the other"
    assert torch.equal(logits(mrrope.unpatch(clone)), plain)


def test_an_unpatched_copy_of_a_model_that_is_patched_later(llama: PreTrainedModel) -> None:
    clone, plain = copy.deepcopy(llama), logits(llama)
    mrrope.patch(llama, "pi", scale=4.0)
    assert torch.equal(logits(clone), plain)


@pytest.mark.slow
def test_unpickled_in_a_fresh_process(tmp_path: Path) -> None:
    families = ["llama", "deepseek_v3", "llama4_text", "gemma3_text", "qwen3_5_text", "qwen3", "olmo2"]
    cases = {}
    for family in families:
        model = tiny_model(family)
        plain = logits(model)
        cases[family] = (mrrope.patch(model, "mrrope_pro", scale=4.0), tokens(2, 24), logits(model), plain)
    path = tmp_path / "models.pickle"
    path.write_bytes(pickle.dumps(cases))
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, path]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


ATTENTION_IN_ANOTHER_MODULE = """
import torch
from transformers.models.llama.modeling_llama import LlamaAttention, rotate_half

def apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

class OtherAttention(LlamaAttention):
    def forward(self, hidden_states, position_embeddings, **_):
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(hidden_states).view(shape).transpose(1, 2) for project in projections)
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None
"""


def test_unpickled_where_the_function_takes_other_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    with mrrope.patched(model, "mrrope_pro", scale=4.0):
        saved = pickle.dumps(model)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, offset=0: (q, k))
    with pytest.raises(ValueError, match=r"patched anew: .*apply_rotary_pos_emb takes other arguments"):
        pickle.loads(saved)


@pytest.mark.slow
def test_unpickled_with_attention_in_another_module_than_the_rotary_embedding(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other_modeling.py").write_text(ATTENTION_IN_ANOTHER_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    other = importlib.import_module("other_modeling")
    for layer in llama.model.layers:
        layer.self_attn.__class__ = other.OtherAttention
    plain = logits(llama)
    want = logits(mrrope.patch(llama, "mrrope_pro", scale=4.0))
    path = tmp_path / "models.pickle"
    path.write_bytes(pickle.dumps({"other": (llama, tokens(2, 24), want, plain)}))
    command = [sys.executable, "-c", IN_A_FRESH_PROCESS, path]
    run = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


def test_weights_are_saved_as_if_unpatched(llama: PreTrainedModel, tmp_path: Path) -> None:
    llama.save_pretrained(tmp_path / "before")
    mrrope.patch(llama, "mrrope_pro", scale=4.0)
    llama.save_pretrained(tmp_path / "patched")
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("before", "patched"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    configs = [(tmp_path / name / "config.json").read_text() for name in ("before", "patched")]
    assert configs[0] == configs[1]
    again = type(llama).from_pretrained(tmp_path / "patched").eval()
    assert torch.equal(logits(again), logits(mrrope.unpatch(llama)))


def test_weights_load_into_a_patched_model(llama: PreTrainedModel) -> None:
    other = tiny_model("llama", seed=1)
    mrrope.patch(other, ready()).load_state_dict(llama.state_dict(), strict=True)
    assert torch.equal(logits(other), logits(mrrope.patch(llama, ready())))
