"""The scale follows the text: every sequence is read with the smallest scale of a ladder that covers it.

A patched model's rotary embedding sees the positions of all tokens before any layer does. From them it takes the length
of every sequence, picks each one's table, and where a sequence has outgrown the table that its cached keys were rotated
by, it has those keys turned first. All of it is arithmetic on the device: nothing waits for the GPU, and a compiled
step stays one graph, whether anything has to be turned or not.

By which table the keys of a cache were rotated, and at which positions, is noted on the cache itself, so that copies of
it know as well.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from mrrope.hf import rope_config
from mrrope.hf.auto_scale.cache_probe import CachedKeys, turn
from mrrope.hf.auto_scale.cached_positions import Name, complete_notes, note_positions
from mrrope.hf.auto_scale.ladder import Ladder

CACHE_ATTRIBUTE = "mrrope_tables"
"""Where a cache keeps, by kind of layer and ladder, which of its tables each sequence's keys are rotated by: int32."""


class Follower(nn.Module):
    """Picks a table for every sequence of a batch, and keeps the cached keys in step."""

    def __init__(self, owner: nn.Module, ladders: dict[str | None, Ladder], keys: dict[str | None, CachedKeys]) -> None:
        super().__init__()
        self.keys = keys
        self.parameters_of_owner = tuple(inspect.signature(owner.forward).parameters)
        # A cache is for the tables that it was filled with.
        self.names = {layer_type: (layer_type, hash(ladder.tables)) for layer_type, ladder in ladders.items()}
        for layer_type, ladder in ladders.items():
            # Integers, so that no cast of the model to another dtype touches them.
            limits = torch.tensor(ladder.reaches[:-1], device="cpu").floor().long()
            self.register_buffer(rope_config.attribute(layer_type, "limits"), limits, persistent=False)
        self.reserve = next((ladder.reserve for ladder in ladders.values() if not ladder.is_fixed), None)
        self.expected_lengths: torch.Tensor | None = None
        self.user: dict[str, int] = {}
        self.batch = 1
        self.cache: Any = None
        self.attention_mask: Any = None
        self.chosen: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}
        self.hooks = (
            owner.register_forward_pre_hook(self.before_call, with_kwargs=True),
            # After an error too, so that the cache is let go.
            owner.register_forward_hook(self.after_call, always_call=True),
        )

    def leave(self) -> None:
        """Takes the hooks off the module they were put on."""
        for hook in self.hooks:
            hook.remove()

    def take(self) -> None:
        """Keeps other threads out: what is known of a call is kept here until it ends."""
        # A compiled call keeps all of it in its graph; and the compiler cannot tell threads apart.
        if torch.compiler.is_compiling():
            return
        thread = threading.get_ident()
        if self.user.setdefault("thread", thread) != thread:
            raise RuntimeError(
                "model must be called by one thread at a time where the scale follows the text, and another one is in "
                "a call: give each a copy, or patch with a fixed scale"
            )

    def is_taken_by_another(self) -> bool:
        """Whether a call that ends here is one that was refused."""
        if torch.compiler.is_compiling() or not self.user:
            return False
        return self.user["thread"] != threading.get_ident()

    def release(self) -> None:
        """Lets other threads in, unless more calls of this one are expected."""
        if self.expected_lengths is None and not torch.compiler.is_compiling():
            self.user.clear()

    @contextlib.contextmanager
    def expecting(self, lengths: torch.Tensor) -> Iterator[None]:
        """Reads texts as ones of these lengths."""
        self.take()
        before = self.expected_lengths
        if before is not None:  # what was expected around this still is
            fits = 1 in (len(before), len(lengths)) or len(before) == len(lengths)
            lengths = torch.maximum(lengths, before if fits else before.max())
        self.expected_lengths = lengths
        try:
            yield
        finally:
            self.expected_lengths = before
            self.release()

    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Keeps what the model was called with: a rotary embedding is told positions and no more."""
        self.take()
        given = dict(zip(self.parameters_of_owner, args, strict=False)) | kwargs
        if given.get("cache") is not None:
            raise ValueError("cache must not be a paged one where the scale follows the text: patch with a fixed scale")
        text: Any = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if text is not None:
            self.batch = text.shape[0]
        self.cache = given.get("past_key_values")
        self.attention_mask = given.get("attention_mask")

    def after_call(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Notes on a cache that the model made itself what its keys are rotated by."""
        if self.is_taken_by_another():
            return
        parts = output if isinstance(output, tuple) else (getattr(output, "past_key_values", None),)
        for cache in parts if self.cache is None else ():
            if hasattr(cache, "layers"):
                for layer_type, (index, positions) in self.chosen.items():
                    note_positions(cache, self.names[layer_type], [], positions)
                    _note(cache, self.names[layer_type], index)
        self.cache = self.attention_mask = None
        self.chosen = {}
        self.release()

    def choose(self, positions: torch.Tensor, tables: torch.Tensor, layer_type: str | None) -> torch.Tensor:
        """The number of each sequence's table, ``[batch]``, with its cached keys turned to that table."""
        limits = getattr(self, rope_config.attribute(layer_type, "limits")).to(positions.device)
        wanted: torch.Tensor = (self._lengths(positions)[:, None] > limits).sum(-1, dtype=torch.int32)
        positions = positions.expand(self.batch, -1)
        if self.cache is not None:
            wanted = self._in_step_with(self.cache, positions, tables, wanted, layer_type)
        self.chosen[layer_type] = wanted, positions
        return wanted

    def _lengths(self, positions: torch.Tensor) -> torch.Tensor:
        """How many tokens of its own each sequence has, or will have where that is known."""
        mask = self.attention_mask
        if isinstance(mask, torch.Tensor) and mask.dim() == 2:
            lengths = mask.to(positions.device).long().sum(-1)
        else:
            lengths = positions.amax(-1) + 1
        lengths = lengths.expand(self.batch)
        if self.expected_lengths is None:
            return lengths
        return torch.maximum(lengths, _for_batch("lengths", self.expected_lengths.to(positions.device), self.batch))

    def _in_step_with(
        self,
        cache: Any,
        positions: torch.Tensor,
        tables: torch.Tensor,
        wanted: torch.Tensor,
        layer_type: str | None,
    ) -> torch.Tensor:
        """Turns what a cache holds. A sequence never goes back to a smaller scale: its last answer was read with it."""
        name = self.names[layer_type]
        parts = self.keys[layer_type].held_by(cache)
        if parts:
            notes = getattr(cache, CACHE_ATTRIBUTE, {})
            old = notes.get(name)
            if notes and old is None:
                raise ValueError("past_key_values must be empty or filled by the tables that the model has now")
            # Keys that nobody made a note of come from the model as it was.
            old = (
                torch.zeros_like(wanted)
                if old is None
                else _for_batch("past_key_values", old.to(wanted.device), self.batch)
            )
            length = parts[0][1].get_seq_length()
            if isinstance(length, torch.Tensor):
                # A static cache may have been emptied for another text.
                old = torch.where(length.to(old.device) > 0, old, wanted)
            wanted = torch.maximum(old, wanted)
            complete_notes(cache, name, [layer for _, layer in parts], positions, self.attention_mask)
            turn(cache, name, parts, tables, old, wanted)
        note_positions(cache, name, self.keys[layer_type].layers_of(cache), positions)
        _note(cache, name, wanted)
        return wanted


def _for_batch(name: str, values: torch.Tensor, batch: int) -> torch.Tensor:
    """What is known of every text, for each of its beams or answers: those are neighbours in a batch."""
    if values.shape[0] == batch:
        return values
    if batch % values.shape[0] != 0:
        raise ValueError(
            f"{name} must be of the sequences that the model is called with where the scale follows the text: it is "
            f"of {values.shape[0]}, and the call of {batch}"
        )
    return values.repeat_interleave(batch // values.shape[0])


def _note(cache: Any, name: Name, index: torch.Tensor) -> None:
    notes = getattr(cache, CACHE_ATTRIBUTE, None)
    if notes is None:
        notes = {}
        setattr(cache, CACHE_ATTRIBUTE, notes)
    if name in notes and notes[name].shape == index.shape:
        # In place: CUDA graphs want the same memory every time.
        notes[name].copy_(index)
    elif torch.compiler.is_compiling():
        notes[name] = index.clone()
    else:
        # A tensor made in inference mode could not be written to outside it.
        with torch.inference_mode(False):
            notes[name] = index.clone()
        torch._dynamo.mark_static_address(notes[name])


def followers_in(model: nn.Module) -> list[Follower]:
    """One for each rotary embedding whose scale follows the text."""
    return [module for module in model.modules() if isinstance(module, Follower)]


@contextlib.contextmanager
def expecting(model: nn.Module, lengths: int | Sequence[int] | torch.Tensor) -> Iterator[None]:
    """Tells a model patched with ``scale="auto"`` how long texts will get, so that they cross no step on the way.

    For reading a long text in chunks, say. ``generate`` does so by itself.

    Args:
        model: the patched model.
        lengths: in tokens, padding left out: one for all sequences, or one for each.
    """
    followers = followers_in(model)
    if not followers:
        raise ValueError(f"model must be patched with scale='auto', and this {type(model).__name__} is not")
    device = next(followers[0].buffers()).device
    expected = torch.as_tensor(lengths, device=device).reshape(-1)
    with contextlib.ExitStack() as stack:
        for follower in followers:
            stack.enter_context(follower.expecting(expected))
        yield


class GenerateKnowingLengths:
    """A model's own ``generate``, which first tells how long the texts will get, so that most never cross a step."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lengths = self._expected_lengths(args, kwargs) if followers_in(self.model) else None
        with contextlib.nullcontext() if lengths is None else expecting(self.model, lengths):
            return type(self.model).generate(self.model, *args, **kwargs)  # type: ignore[attr-defined]

    def _expected_lengths(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        given = dict(zip(("inputs", "generation_config"), args, strict=False)) | kwargs
        texts = (given.get(name) for name in ("inputs_embeds", "input_ids", "inputs"))
        text = next((text for text in texts if isinstance(text, torch.Tensor)), None)
        if text is None:
            return None
        config = given.get("generation_config") or self.model.generation_config

        def setting(name: str) -> Any:
            return given[name] if given.get(name) is not None else getattr(config, name, None)

        mask, pad = given.get("attention_mask"), setting("pad_token_id")
        if mask is None:
            # As generate itself tells padding from text.
            is_padded = pad is not None and pad != setting("eos_token_id") and text.dim() == 2
            mask = text != pad if is_padded else torch.ones(text.shape[:2], device=text.device)
        room = 0
        if setting("max_new_tokens") is not None:
            room = setting("max_new_tokens")
        elif setting("max_length") is not None:
            room = max(0, setting("max_length") - text.shape[1])
        reserve = followers_in(self.model)[0].reserve
        room = room if reserve is None else min(room, reserve)
        lengths: torch.Tensor = mask.long().sum(-1)
        return lengths + room
