"""A tiny random Llama of float32 on disk, and what transformers computes for it: the reference of all answers."""

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from byte_llama import byte_llama, byte_tokenizer

import mrrope

NATIVE_LENGTH = 64
METHOD = "mrrope_uni"
AUTO = {"rope_type": METHOD, "factor": "auto", "max_factor": 16, "reserve": 32}
"""Lengths of the ladder: 64, 128, 256, 512, 1024."""
TOLERANCE = 1e-4
"""Of log-probabilities, which float32 moves by up to 1e-5 and another scale by 0.4 to 0.7 on average."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"

# vLLM's attention on CPUs takes heads of 32 components or more; such weights let a token depend on all before it.
SETTINGS = {
    "layers": 2,
    "heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_size": 64,
    "initializer_range": 0.15,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def save(folder: Path) -> Path:
    """Write the model, with a tokenizer of one token per byte, as a folder that vLLM loads."""
    byte_llama(NATIVE_LENGTH, **SETTINGS).save_pretrained(folder)
    tokenizer = byte_tokenizer(adds_bos=True)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def random_tokens(count: int, seed: int) -> list[int]:
    """Return tokens that are bytes of text."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, 258, (count,), generator=generator).tolist()


def table_set(scale: float) -> mrrope.TableSet:
    """Return a set in which no two layers and heads are alike."""
    settings = {"rotary_dim": SETTINGS["head_dim"], "base": 10_000.0, "original_max_position": NATIVE_LENGTH}

    def heads(*powers: float) -> mrrope.HeadTables:
        return mrrope.HeadTables(
            mrrope.frequency_table("mrrope_pow", scale=scale, power=power, **settings) for power in powers
        )

    return mrrope.TableSet([heads(0.0, 3.0), heads(1.0, 0.2)])


@functools.cache
def _model(scale: float, has_sets: bool) -> torch.nn.Module:
    model = byte_llama(NATIVE_LENGTH, **SETTINGS)
    if scale == 1:
        return model
    return mrrope.patch(model, table_set(scale)) if has_sets else mrrope.patch(model, METHOD, scale=scale)


@torch.no_grad()
def log_probabilities(tokens: Sequence[int], scale: float, *, has_sets: bool = False) -> torch.Tensor:
    """Return those of every next token at every token, ``[tokens, vocabulary]``; at scale 1, of the stock model."""
    return _model(scale, has_sets)(torch.tensor([tokens])).logits[0].log_softmax(-1)


def of_next_tokens(tokens: Sequence[int], scale: float, *, has_sets: bool = False) -> torch.Tensor:
    """Return the log-probability of every token but the first."""
    known = log_probabilities(tokens[:-1], scale, has_sets=has_sets)
    return known.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]


def is_greedy(prompt: Sequence[int], answer: Sequence[int], scale: float, *, has_sets: bool = False) -> bool:
    """Whether every token of an answer is the most probable one, or equal to it within the tolerance."""
    known = log_probabilities([*prompt, *answer], scale, has_sets=has_sets)[len(prompt) - 1 : -1]
    chosen = known.gather(1, torch.tensor(answer)[:, None])[:, 0]
    return bool((known.max(-1).values - chosen <= TOLERANCE).all())


def parts_by_scale(prompt: Sequence[int], answer: Sequence[int], scale: int) -> list[tuple[int, list[int], list[int]]]:
    """Return how an answer grows from a scale on: the scale of each part, the text before it, and its tokens."""
    parts, start = [], 0
    while start < len(answer):
        end = min(len(answer), scale * NATIVE_LENGTH - len(prompt))
        parts.append((scale, [*prompt, *answer[:start]], list(answer[start:end])))
        scale, start = 2 * scale, end
    return parts
