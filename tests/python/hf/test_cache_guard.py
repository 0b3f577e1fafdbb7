"""A cache that tables of a patch have filled is continued by those tables alone."""

import copy
import pickle
import warnings

import pytest
import torch

import mrrope

pytest.importorskip("transformers")

from model_tolerance import relative, tolerance
from patched_models import UNFUSABLE, model_named
from tiny_models import LENGTH, tiny_model, tokens
from transformers import DynamicCache, PreTrainedModel, StaticCache

TEXT = tokens(2, 24)
PATCHES = {
    "scale 2": {"scale": 2.0},
    "scale 4": {"scale": 4.0},
    "auto": {"scale": "auto", "max_scale": 4.0},
    "longer auto": {"scale": "auto", "max_scale": 8.0},
    "unpatched": None,
}
REFUSED = "past_key_values must be empty or filled by the tables that the model has now"

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*not the fused op"),
    pytest.mark.filterwarnings("ignore:.*its sliding window"),
    pytest.mark.usefixtures("quiet_transformers"),
]


def as_patched(model: PreTrainedModel, patch: str) -> PreTrainedModel:
    if mrrope.is_patched(model):
        mrrope.unpatch(model)
    options = PATCHES[patch]
    return model if options is None else mrrope.patch(model, "mrrope_pro", **options)


@torch.no_grad()
def read(model: PreTrainedModel, ids: torch.Tensor, cache: object = None) -> object:
    return model(ids, past_key_values=cache, use_cache=True)


def filled(model: PreTrainedModel, kind: str = "dynamic") -> object:
    cache = {"created": None, "dynamic": DynamicCache(config=model.config), "static": StaticCache(model.config, LENGTH)}
    return read(model, TEXT[:, :16], cache[kind]).past_key_values


@pytest.mark.parametrize("kind", ["created", "dynamic", "static"])
@pytest.mark.parametrize(
    ("first", "then"),
    [(a, b) for a in PATCHES for b in PATCHES if a not in (b, "unpatched")],
)
def test_other_tables_refuse_it(first, then, kind):
    model = tiny_model("llama")
    cache = filled(as_patched(model, first), kind)
    keys = cache.layers[0].keys.clone()
    as_patched(model, then)
    with pytest.raises(ValueError, match=REFUSED):
        read(model, TEXT[:, 16:], cache)
    assert torch.equal(cache.layers[0].keys, keys)


@pytest.mark.parametrize("kind", ["created", "dynamic", "static"])
@pytest.mark.parametrize("patch", ["scale 4", "auto"])
def test_the_same_tables_continue_it(patch, kind):
    model = as_patched(tiny_model("llama"), patch)
    whole = lambda model: read(model, TEXT).logits[:, 16:]  # noqa: E731
    want = whole(model)
    cache = filled(model, kind)
    got = read(as_patched(model, patch), TEXT[:, 16:], cache).logits
    assert relative(got, want) < tolerance(model, whole)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_keys_without_a_record(kind):
    """As a prefix that was learned, which no table rotates; or of the unpatched model, for which only auto is right."""
    cache = filled(tiny_model("llama"), kind)
    model = as_patched(tiny_model("llama"), "scale 4")
    with pytest.warns(UserWarning, match="past_key_values holds keys that the tables of this LlamaModel have not rot"):
        read(model, TEXT[:, 16:], copy.deepcopy(cache))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(model, TEXT[:, 16:], copy.deepcopy(cache))
        whole = lambda model: read(model, TEXT).logits[:, 16:]  # noqa: E731
        want = whole(as_patched(model, "auto"))
        assert relative(read(model, TEXT[:, 16:], copy.deepcopy(cache)).logits, want) < tolerance(model, whole)
        mrrope.patch(model, "rope")
        assert relative(read(model, TEXT[:, 16:], copy.deepcopy(cache)).logits, want) < tolerance(model, whole)
        mrrope.patch(model, "mrrope_pro", scale=4.0)
        again = filled(model, kind)
        read(model, TEXT[:, 16:17], copy.deepcopy(again))
        read(copy.deepcopy(model), TEXT[:, 16:17], again)


def test_tables_that_are_the_models_own():
    model = mrrope.patch(tiny_model("llama"), "rope")
    cache = filled(model)
    read(mrrope.unpatch(model), TEXT[:, 16:18], cache)
    read(mrrope.patch(model, "pi", scale=1.0), TEXT[:, 18:20], cache)
    with pytest.raises(ValueError, match=REFUSED):
        read(model, TEXT[:, 16:], filled(as_patched(tiny_model("llama"), "scale 4")))


@pytest.mark.parametrize("family", ["gemma3_text", "llama4_text", "qwen3_5_text", "moshi", "deepseek_v3", UNFUSABLE])
def test_families(family):
    model = as_patched(model_named(family), "scale 4")
    cache = read(model, TEXT[:, :16]).past_key_values
    read(model, TEXT[:, 16:17], cache)
    with pytest.raises(ValueError, match=REFUSED):
        read(as_patched(model, "scale 2"), TEXT[:, 17:18], cache)
    with pytest.raises(ValueError, match=REFUSED):
        read(as_patched(model, "unpatched"), TEXT[:, 17:18], cache)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("then", PATCHES)
def test_an_emptied_cache_is_free(then, kind):
    model = as_patched(tiny_model("llama"), "scale 4")
    cache = filled(model, kind)
    cache.reset() if kind == "static" else cache.crop(-16)
    as_patched(model, then)
    want = read(model, TEXT).logits
    whole = lambda model: read(model, TEXT).logits  # noqa: E731
    assert relative(read(model, TEXT, cache).logits, want) < tolerance(model, whole)
    read(model, TEXT[:, :1], cache)


def test_an_emptied_copy_is_free_for_the_models_own_tables():
    """A copy that no model knows is marked on itself alone."""
    model = as_patched(tiny_model("llama"), "scale 4")
    copied = copy.deepcopy(filled(model))
    copied.crop(-16)
    mrrope.patch(model, "rope")
    want = read(model, TEXT).logits
    read(model, TEXT[:, :16], copied)
    got = read(model, TEXT[:, 16:], copied).logits
    whole = lambda model: read(model, TEXT).logits  # noqa: E731
    assert relative(got, want[:, 16:]) < tolerance(model, whole)
    with pytest.raises(ValueError, match=REFUSED):
        read(as_patched(model, "scale 4"), TEXT[:, :1], filled(as_patched(tiny_model("llama"), "scale 2")))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_copies_of_a_cache(copied):
    model = as_patched(tiny_model("llama"), "scale 4")
    cache = filled(model)
    want = read(model, TEXT[:, 16:], copy.deepcopy(cache)).logits
    early = copied(cache)
    with pytest.raises(ValueError, match=REFUSED):
        read(as_patched(model, "scale 2"), TEXT[:, 16:], early)
    late = copied(cache)
    assert isinstance(late, DynamicCache)
    assert type(late).__name__ == "DynamicCache"
    mrrope.unpatch(model)
    with pytest.raises(ValueError, match=REFUSED):
        read(model, TEXT[:, 16:], late)
    assert torch.equal(read(as_patched(model, "scale 4"), TEXT[:, 16:], late).logits, want)


def test_copies_and_other_processes_of_a_model():
    model = as_patched(tiny_model("llama"), "scale 4")
    cache = filled(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        continued = copy.deepcopy(cache)
        read(other, TEXT[:, 16:17], continued)
        with pytest.raises(ValueError, match=REFUSED):
            read(mrrope.unpatch(other), TEXT[:, 17:18], continued)
    read(model, TEXT[:, 16:17], cache)


def test_files_and_copies_of_a_model_hold_no_cache():
    model = as_patched(tiny_model("llama"), "scale 4")
    size = len(pickle.dumps(model))
    cache = filled(model)
    assert len(pickle.dumps(model)) == size
    copied = copy.deepcopy(model)
    mrrope.unpatch(copied)
    read(model, TEXT[:, 16:17], cache)


@torch.no_grad()
@pytest.mark.parametrize("kind", ["created", "dynamic", "static"])
def test_layers_that_are_called_one_by_one(kind):
    model = as_patched(tiny_model("llama"), "scale 4")
    want = model.model(TEXT[:, :17]).last_hidden_state[:, 16:]
    cache = filled(model, kind)
    states = model.get_input_embeddings()(TEXT[:, 16:17])
    embeddings = model.model.rotary_emb(states, torch.tensor([[16]]))
    mask = torch.arange(LENGTH)[None, None, None] <= 16 if kind == "static" else None
    for layer in model.model.layers:
        states = layer(states, position_embeddings=embeddings, past_key_values=cache, attention_mask=mask)
    torch.testing.assert_close(model.model.norm(states), want, rtol=1e-4, atol=1e-5)


def test_keys_that_the_caller_appends():
    """As of documents that were read apart."""
    model = as_patched(tiny_model("llama"), "scale 4")
    cache, other = filled(model), filled(model)
    for i, layer in enumerate(other.layers):
        cache.update(layer.keys, layer.values, i)
    assert cache.get_seq_length() == 32
    read(model, TEXT[:, 16:17], cache)


def test_a_cache_in_use_keeps_its_class():
    """Pytrees, torch.export and ``generate`` test it."""
    model = as_patched(tiny_model("llama"), "scale 4")
    dynamic, static = filled(model), filled(model, "static")
    assert type(dynamic) is DynamicCache
    assert type(static) is StaticCache
    with pytest.raises(ValueError, match="not supported with Static cache"):
        model.generate(TEXT[:1], past_key_values=static, assistant_model=tiny_model("llama"), max_new_tokens=4)


def test_an_error_in_a_call_leaves_the_cache_guarded():
    model = as_patched(tiny_model("llama"), "scale 4")
    cache = filled(model)
    with pytest.raises(IndexError):
        read(model, torch.full((2, 1), 10**6), cache)
    with pytest.raises(ValueError, match=REFUSED):
        read(mrrope.unpatch(model), TEXT[:, 16:], cache)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_compiled(kind):
    model = as_patched(tiny_model("llama"), "scale 4")
    want = read(model, TEXT[:, 16:], filled(model, kind)).logits
    cache = filled(model, kind)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(read(compiled, TEXT[:, 16:], cache).logits, want)
    with pytest.raises(ValueError, match=REFUSED):
        read(as_patched(model, "scale 2"), TEXT[:, 16:], cache)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
def test_generate_at_one_scale_after_another(implementation):
    model = tiny_model("llama")
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "cache_implementation": implementation}
    for patch in (*PATCHES, *reversed(PATCHES)):
        got = as_patched(model, patch).generate(TEXT, **options)
        assert torch.equal(got, as_patched(tiny_model("llama"), patch).generate(TEXT, **options))
