"""Tiny models with scale="auto", what they read, and what their caches hold."""

import copy
import pickle

import pytest
import torch

import mrrope
from mrrope.hf.auto_scale.follower import TABLES_ATTRIBUTE

pytest.importorskip("transformers")

import tiny_models
import transformers

NATIVE, MAX_SCALE = 32, 4.0


def tiny_llama(**changes):
    torch.manual_seed(0)
    sizes = {**tiny_models.TINY_SIZES, "max_position_embeddings": NATIVE, "num_hidden_layers": 3, **changes}
    config = transformers.LlamaConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    return transformers.LlamaForCausalLM(config).eval()


def auto_scaled(model):
    return mrrope.patch(model, "mrrope_pro", scale="auto", max_scale=MAX_SCALE)


def text(length, batch=1, seed=0):
    generator = torch.Generator(device=torch.get_default_device()).manual_seed(seed)
    return torch.randint(3, 40, (batch, length), generator=generator)


@torch.no_grad()
def logits(model, ids, **options):
    return model(ids, **options).logits


def fixed(model, ids, scale):
    with mrrope.patched(model, "mrrope_pro", scale=scale):
        return logits(model, ids)


def tables_of(cache):
    (index,) = getattr(cache, TABLES_ATTRIBUTE).values()
    return index.tolist()


def synchronized(cache):
    """Synchronize the device around the copies of an offloaded cache.

    The cache prefetches a layer on its own stream without waiting for the offload of that layer, nor for the reads of
    earlier layers whose memory it reuses. This race shows with three layers, or on a shared GPU.
    """

    def with_barriers(call):
        def synchronizing(*args, **kwargs):
            torch.cuda.synchronize()
            call(*args, **kwargs)
            torch.cuda.synchronize()

        return synchronizing

    cache.offload, cache.prefetch = with_barriers(cache.offload), with_barriers(cache.prefetch)
    return cache


def caches(model):
    """Return a cache of every kind. Offloaded ones keep their layers in host memory and need a GPU."""
    config = model.config
    found = {
        "dynamic": transformers.DynamicCache(config=config),
        "static": transformers.StaticCache(config=config, max_cache_len=160),
    }
    if model.device.type == "cuda":
        found["offloaded"] = synchronized(transformers.DynamicCache(config=config, offloading=True))
        found["offloaded static"] = synchronized(
            transformers.StaticCache(config=config, max_cache_len=160, offloading=True)
        )
    return found


def tiny_mistral():
    """Return a Mistral whose layers all have a sliding window."""
    torch.manual_seed(0)
    sizes = {**tiny_models.TINY_SIZES, "max_position_embeddings": NATIVE, "sliding_window": 16}
    parameters = {"rope_type": "default", "rope_theta": 1e4}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, rope_parameters=parameters)).eval()


def keys_by_tables(model, ids, positions, steps):
    """Return the first layer's keys of these tokens, rotated by each sequence's table."""
    model = copy.deepcopy(model)
    rows = []
    for row, step in enumerate(steps):
        mrrope.patch(model, "mrrope_pro", scale=2.0**step)
        cache = transformers.DynamicCache()
        logits(model, ids[row : row + 1], position_ids=positions[row : row + 1], past_key_values=cache)
        rows.append(cache.layers[0].keys)
    return torch.cat(rows)


def counted(mask):
    """Return positions as generate counts them."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def assert_keys_match_their_positions(model, cache, ids, positions, end):
    want = keys_by_tables(model, ids[:, :end], positions[:, :end], tables_of(cache))
    got = cache.layers[0].keys
    got = got[:, :, : min(end, got.shape[-2])]
    torch.testing.assert_close(got.cpu(), want[:, :, -got.shape[-2] :].cpu(), rtol=0.0, atol=1e-6)


GENERATE = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


def pickled(model):
    return pickle.loads(pickle.dumps(model))
