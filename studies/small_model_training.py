"""Train small byte-level models from scratch, in a minute each.

Some training rows contain pass keys, some repeat themselves. Repetition teaches a model to look back, without which it
finds no key.
"""

from __future__ import annotations

import functools
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from mrrope.evaluation.retrieval_tasks import PASSKEY_QUESTION, PASSKEY_SENTENCE

VOCABULARY = 256
DIGITS = "#####"
"""Placeholder for a key's five digits."""
SENTENCE = f"\n{PASSKEY_SENTENCE.format(key=DIGITS)}\n"
QUESTION = f"\n{PASSKEY_QUESTION} {DIGITS}.\n"
DONE = "training.json"


class ByteTokenizer:
    """Tokens are bytes."""

    bos_token_id = eos_token_id = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> SimpleNamespace:
        return SimpleNamespace(input_ids=list(text.encode()))

    def decode(self, tokens: list[int]) -> str:
        """Decode; characters that are cut at either end are replaced."""
        return bytes(tokens).decode(errors="replace")


@dataclass(frozen=True)
class Shape:
    """The shape of a model; the defaults give about 25M parameters."""

    head_dim: int
    hidden: int = 512
    intermediate: int = 1376
    layers: int = 8
    trained_length: int = 1024

    def model(self, seed: int) -> LlamaForCausalLM:
        """A model with random weights."""
        torch.manual_seed(seed)
        heads = self.hidden // self.head_dim
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=self.hidden,
                intermediate_size=self.intermediate,
                num_hidden_layers=self.layers,
                num_attention_heads=heads,
                num_key_value_heads=heads,
                head_dim=self.head_dim,
                max_position_embeddings=self.trained_length,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4},
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=None,
            )
        )


@dataclass(frozen=True)
class Recipe:
    """Training settings."""

    seconds: float
    rows: int = 32
    peak: float = 2e-3
    warm_up: float = 0.03
    """Share of the time."""
    keyed: float = 0.5
    """Share of rows with a pass key."""
    repeated: float = 0.2
    """Share of rows that repeat themselves."""
    compiled: bool = True

    def learning_rate(self, progress: float) -> float:
        """Linear warm-up, then cosine decay to zero."""
        down = (1 + math.cos(math.pi * min(progress, 1.0))) / 2
        return self.peak * min(progress / self.warm_up, down)


def batch(text: torch.Tensor, length: int, recipe: Recipe, rng: torch.Generator) -> torch.Tensor:
    """Random windows of the text, ``[rows, length]``.

    The first rows contain a pass key and two questions for it, the last rows repeat a passage.
    """
    starts = torch.randint(len(text) - length, (recipe.rows, 1), device=text.device, generator=rng)
    tokens = text[starts + torch.arange(length, device=text.device)].long()
    keyed, repeated = round(recipe.keyed * recipe.rows), round(recipe.repeated * recipe.rows)
    hide_keys(tokens[:keyed], rng)
    after = torch.randint(length // 8, length // 2 + 1, (repeated, 1), device=text.device, generator=rng)
    again = torch.arange(length, device=text.device) % after
    tokens[recipe.rows - repeated :] = tokens[recipe.rows - repeated :].gather(1, again)
    return tokens


def hide_keys(tokens: torch.Tensor, rng: torch.Generator) -> None:
    """Overwrite a part of each row with a key, a question anywhere after it, and a question at the end."""
    rows, length = tokens.shape
    device = tokens.device

    def uniform(most: torch.Tensor) -> torch.Tensor:
        return (torch.rand(rows, device=device, generator=rng) * (most + 1)).long()

    digits = torch.randint(ord("0"), ord("9") + 1, (rows, len(DIGITS)), device=device, generator=rng)
    digits[:, 0] = digits[:, 0].clamp(min=ord("1"))
    room = length - len(SENTENCE) - 2 * len(QUESTION)
    if room < 0:
        raise ValueError(f"trained_length must be at least {length - room} for keys to be hidden, got {length}")
    told = uniform(torch.full((rows,), room, device=device))
    asked = told + len(SENTENCE) + uniform(room - told)
    last = torch.full_like(told, length - len(QUESTION))
    for words, places in ((SENTENCE, told), (QUESTION, asked), (QUESTION, last)):
        letters, columns = template(words, device)
        written = letters.repeat(rows, 1)
        written[:, columns] = digits.repeat(1, words.count(DIGITS))
        tokens.scatter_(1, places[:, None] + torch.arange(len(words), device=device), written)


@functools.cache
def template(words: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of a sentence and the columns of its digits; cached on the device to avoid a copy per step."""
    letters = torch.tensor(list(words.encode()), device=device)
    return letters, (letters == ord(DIGITS[0])).nonzero().flatten()


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean loss of every token but the first."""
    with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
        logits = model(input_ids=tokens, use_cache=False).logits
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


def train(model: LlamaForCausalLM, text: torch.Tensor, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Train for the recipe's time, excluding compilation, and return a record of the training."""
    rng = torch.Generator(text.device).manual_seed(seed)
    length = model.config.max_position_embeddings
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.peak, betas=(0.9, 0.95), weight_decay=0.1, fused=text.is_cuda
    )

    def step() -> torch.Tensor:
        loss = loss_of(model, batch(text, length, recipe, rng))
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss.detach()

    step().item()  # compiles
    optimizer.zero_grad()
    steps, losses = 0, []
    start = time.monotonic()
    with tqdm(total=round(recipe.seconds), bar_format="{desc} {percentage:3.0f}%|{bar}| {postfix}") as bar:
        while (elapsed := time.monotonic() - start) < recipe.seconds:
            for group in optimizer.param_groups:
                group["lr"] = recipe.learning_rate(elapsed / recipe.seconds)
            loss = step()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps % 20 == 1:  # item() synchronizes, so that elapsed time includes the GPU's
                losses.append([steps, loss.item()])
                bar.update(round(elapsed) - bar.n)
                bar.set_postfix_str(f"step {steps}, loss {losses[-1][1]:.3f}")
    return {
        "parameters": sum(weights.numel() for weights in model.parameters()),
        "steps": steps,
        "tokens": steps * recipe.rows * length,
        "seconds": time.monotonic() - start,
        "losses": losses,
        **{name: value for name, value in asdict(recipe).items() if name != "seconds"},
    }


def trained_model(
    folder: Path, shape: Shape, seed: int, text: torch.Tensor, recipe: Recipe, ready: dict[Shape, LlamaForCausalLM]
) -> dict[str, Any]:
    """Train a model and save it in the folder, unless it is there; return the record of its training.

    Args:
        folder: of the model.
        shape: of the model.
        seed: of the weights and of the training rows.
        text: bytes, on the device to train on.
        recipe: training settings.
        ready: compiled models by shape, which are reused; the first model of a shape is added.
    """
    if not (folder / DONE).is_file():
        fresh = shape.model(seed).to(text.device)
        model = ready.setdefault(shape, fresh)
        if model is fresh and recipe.compiled:
            # Layer by layer: all layers share one compiled graph, so that compilation takes seconds.
            for layer in model.model.layers:
                layer.compile()
        model.load_state_dict(fresh.state_dict())
        record = train(model.train(), text, recipe, seed)
        model.save_pretrained(folder)
        (folder / DONE).write_text(json.dumps(record) + "\n")
    found: dict[str, Any] = json.loads((folder / DONE).read_text())
    return found
