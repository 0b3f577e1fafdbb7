"""A scale per sequence: each gets the smallest scale of a ladder that covers its length.

A patched model's rotary embedding sees the positions of all tokens before any layer runs. The follower takes the length
of every sequence from them and picks its table. Where a sequence has outgrown the table of its cached keys, it
re-rotates those keys first. All of this is arithmetic on the device, without synchronization, and a compiled step stays
one graph.

The table and the positions of cached keys are recorded on the cache itself, so that copies of a cache carry them.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from mrrope.hf import rope_config
from mrrope.hf.auto_scale.cached_keys import CachedKeys, rescale_parts
from mrrope.hf.auto_scale.cached_positions import LadderKey, complete_records, record_positions
from mrrope.hf.auto_scale.ladder import Ladder
from mrrope.hf.rope_config import RotaryTable

TABLES_ATTRIBUTE = "mrrope_tables"
"""Attribute of a cache with the int32 index, by ladder, of the table that each sequence's keys are rotated by."""


class Follower(nn.Module):
    """Picks a table for every sequence of a batch, and re-rotates cached keys to it.

    Forward hooks on the module that calls the rotary embedding pass the arguments of each call to the follower. The
    state of a call is kept here until the call ends, so that one thread at a time may call the model.
    """

    def __init__(
        self,
        owner: nn.Module,
        ladders: dict[str | None, Ladder[RotaryTable]],
        keys: dict[str | None, CachedKeys],
        *,
        has_several_positions: bool,
    ) -> None:
        super().__init__()
        self.keys = keys
        self.has_several_positions = has_several_positions
        self.parameters_of_owner = tuple(inspect.signature(owner.forward).parameters)
        # The hash rejects caches that were filled with other tables.
        self.ladder_keys = {
            layer_type: (layer_type, hash(tuple(map(rope_config.of_keys, ladder.tables))))
            for layer_type, ladder in ladders.items()
        }
        for layer_type, ladder in ladders.items():
            # Integers are not affected by casts of the model to another dtype.
            limits = torch.tensor(ladder.reaches[:-1], device="cpu").floor().long()
            self.register_buffer(rope_config.attribute(layer_type, "limits"), limits, persistent=False)
        self.reserve = next((ladder.reserve for ladder in ladders.values() if not ladder.is_fixed), None)
        self.hooks: tuple[RemovableHandle, ...] = ()
        self.expected_lengths: torch.Tensor | None = None
        self.expected_new_tokens: int | None = None  # after the positions of the next call
        self.user: dict[str, int] = {}
        self.batch = 1
        self.tokens: int | None = None
        self.cache: Any = None
        self.attention_mask: Any = None
        self.chosen: dict[str | None, tuple[torch.Tensor, torch.Tensor]] = {}

    def attach(self, owner: nn.Module) -> None:
        """Register the hooks on the module that calls the rotary embedding."""
        self.hooks = (
            owner.register_forward_pre_hook(self.before_call, with_kwargs=True),
            # Also after an error, to release the cache.
            owner.register_forward_hook(self.after_call, always_call=True),
        )

    def detach(self) -> None:
        """Remove the hooks."""
        for hook in self.hooks:
            hook.remove()
        self.hooks = ()

    def acquire(self) -> None:
        """Reserve the follower for this thread; raise RuntimeError where another thread is in a call."""
        # Compiled calls keep their state in the graph, and Dynamo cannot trace thread identifiers.
        if torch.compiler.is_compiling():
            return
        thread = threading.get_ident()
        if self.user.setdefault("thread", thread) != thread:
            raise RuntimeError(
                "model must be called by one thread at a time where the scale follows the text, and another one is in "
                "a call: give each a copy, or patch with a fixed scale"
            )

    def is_held_by_other_thread(self) -> bool:
        """Whether the call that ends now is one that ``acquire`` refused."""
        if torch.compiler.is_compiling() or not self.user:
            return False
        return self.user["thread"] != threading.get_ident()

    def release(self) -> None:
        """Admit other threads, unless this one is inside ``expecting``."""
        if self.expected_lengths is None and not torch.compiler.is_compiling():
            self.user.clear()

    @contextlib.contextmanager
    def expecting(self, lengths: torch.Tensor) -> Iterator[None]:
        """Treat sequences as at least this long inside the context."""
        self.acquire()
        before = self.expected_lengths
        if before is not None:  # nested: the lengths of the outer context still apply
            fits = 1 in (len(before), len(lengths)) or len(before) == len(lengths)
            lengths = torch.maximum(lengths, before if fits else before.max())
        self.expected_lengths = lengths
        try:
            yield
        finally:
            self.expected_lengths = before
            self.release()

    @contextlib.contextmanager
    def expecting_generation(self, prompts: torch.Tensor, new_tokens: int) -> Iterator[None]:
        """Treat prompts of these lengths in tokens as continued by as many new tokens inside the context."""
        has_one_position = not self.has_several_positions
        # Several positions per token may end far below the number of tokens. The first call has those of the prompt.
        known = prompts + new_tokens if has_one_position else torch.zeros_like(prompts[:1])
        with self.expecting(known.to(next(self.buffers()).device)):
            self.expected_new_tokens = None if has_one_position else new_tokens
            try:
                yield
            finally:
                self.expected_new_tokens = None

    def before_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Store the arguments of the call, of which the rotary embedding gets only the positions."""
        self.acquire()
        given = dict(zip(self.parameters_of_owner, args, strict=False)) | kwargs
        if given.get("cache") is not None:
            raise ValueError("cache must not be a paged one where the scale follows the text: patch with a fixed scale")
        text: Any = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if text is not None:
            self.batch, self.tokens = text.shape[:2]
        self.cache = given.get("past_key_values")
        self.attention_mask = given.get("attention_mask")

    def after_call(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Record tables and positions on a cache that the model created during the call."""
        if self.is_held_by_other_thread():
            return
        parts = output if isinstance(output, tuple) else (getattr(output, "past_key_values", None),)
        for cache in parts if self.cache is None else ():
            if hasattr(cache, "layers"):
                for layer_type, (index, positions) in self.chosen.items():
                    record_positions(cache, self.ladder_keys[layer_type], [], positions)
                    _record_tables(cache, self.ladder_keys[layer_type], index)
        self.cache = self.attention_mask = None
        self.chosen = {}
        self.expected_new_tokens = None
        self.release()

    def choose(self, positions: torch.Tensor, tables: torch.Tensor, layer_type: str | None) -> torch.Tensor:
        """Return the table index of each sequence, ``[batch]``, with its cached keys re-rotated to that table."""
        limits = getattr(self, rope_config.attribute(layer_type, "limits")).to(positions.device)
        wanted: torch.Tensor = (self._sequence_lengths(positions)[:, None] > limits).sum(-1, dtype=torch.int32)
        if self.tokens is not None:
            # Some models call the rotary embedding with the positions of cached tokens, too.
            positions = positions[..., -self.tokens :]
        positions = positions.expand(*positions.shape[:-2], self.batch, -1)
        if self.cache is not None:
            wanted = self._follow_cache(self.cache, positions, tables, wanted, layer_type)
        self.chosen[layer_type] = wanted, positions
        return wanted

    def _sequence_lengths(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the length of each sequence without padding, or its expected length if that is larger.

        With several positions per token the largest counts: those of an image advance by its sides, not its tokens.
        """
        mask = self.attention_mask
        if self.has_several_positions:
            lengths = positions.amax((0, 2)) + 1 + (self.expected_new_tokens or 0)
        elif isinstance(mask, torch.Tensor) and mask.dim() == 2:
            lengths = mask.to(positions.device).long().sum(-1)
        else:
            lengths = positions.amax(-1) + 1
        lengths = lengths.expand(self.batch)
        if self.expected_lengths is not None:
            expected = _expanded_to_batch("lengths", self.expected_lengths.to(positions.device), self.batch)
            lengths = torch.maximum(lengths, expected)
        if self.expected_new_tokens is not None and self.cache is None:
            self.expected_lengths = lengths  # with a cache, the record of its tables lasts
        return lengths

    def _follow_cache(
        self,
        cache: Any,
        positions: torch.Tensor,
        tables: torch.Tensor,
        wanted: torch.Tensor,
        layer_type: str | None,
    ) -> torch.Tensor:
        """Re-rotate what a cache holds, and return each sequence's table index, which never decreases."""
        key = self.ladder_keys[layer_type]
        parts = self.keys[layer_type].held_by(cache)
        if parts:
            # Keys without a record were cached by the unpatched model, whose table is the first: those of other tables
            # are refused (mrrope.hf.cache_guard).
            old = getattr(cache, TABLES_ATTRIBUTE, {}).get(key)
            old = (
                torch.zeros_like(wanted)
                if old is None
                else _expanded_to_batch("past_key_values", old.to(wanted.device), self.batch)
            )
            length = parts[0][1].get_seq_length()
            if isinstance(length, torch.Tensor):
                # A static cache may have been reset for another text.
                old = torch.where(length.to(old.device) > 0, old, wanted)
            # A sequence never returns to a smaller scale: its last answer was computed with the larger one.
            wanted = torch.maximum(old, wanted)
            complete_records(cache, key, [layer for _, layer in parts], positions, self.attention_mask)
            rescale_parts(cache, key, parts, tables, old, wanted)
        record_positions(cache, key, self.keys[layer_type].layers_of(cache), positions)
        _record_tables(cache, key, wanted)
        return wanted


def _expanded_to_batch(name: str, values: torch.Tensor, batch: int) -> torch.Tensor:
    """Repeat per-text values for the beams or samples of each text, which are adjacent in the batch."""
    if values.shape[0] == batch:
        return values
    if batch % values.shape[0] != 0:
        raise ValueError(
            f"{name} must be of the sequences that the model is called with where the scale follows the text: it is "
            f"of {values.shape[0]}, and the call of {batch}"
        )
    return values.repeat_interleave(batch // values.shape[0])


def _record_tables(cache: Any, key: LadderKey, index: torch.Tensor) -> None:
    """Record on a cache the table index of each sequence's keys."""
    records = getattr(cache, TABLES_ATTRIBUTE, None)
    if records is None:
        records = {}
        setattr(cache, TABLES_ATTRIBUTE, records)
    if key in records and records[key].shape == index.shape:
        # In place, so that the address is stable for CUDA graphs.
        records[key].copy_(index)
    elif torch.compiler.is_compiling():
        records[key] = index.clone()
    else:
        # A tensor made in inference mode cannot be written outside it.
        with torch.inference_mode(False):
            records[key] = index.clone()
        torch._dynamo.mark_static_address(records[key])


def followers_in(model: nn.Module) -> list[Follower]:
    """Return the followers in a model, one per rotary embedding patched with ``scale="auto"``."""
    return [module for module in model.modules() if isinstance(module, Follower)]


@contextlib.contextmanager
def expecting(model: nn.Module, lengths: int | Sequence[int] | torch.Tensor) -> Iterator[None]:
    """Context manager that announces the final length of texts to a model patched with ``scale="auto"``.

    The model uses the scale for that length from the start, so that no cached keys have to be re-rotated, for example
    while a long text is read in chunks. ``generate`` announces its lengths itself.

    Args:
        model: The patched model.
        lengths: Lengths in tokens without padding: one for all sequences, or one per sequence. For models with several
            positions per token (M-RoPE) the largest position plus 1.

    Raises:
        ValueError, TypeError: The model is not patched with ``scale="auto"``, or lengths are not positive integers.
        RuntimeError: Another thread is in a call of the model.
    """
    followers = followers_in(model)
    if not followers:
        raise ValueError(f"model must be patched with scale='auto', and this {type(model).__name__} is not")
    device = next(followers[0].buffers()).device
    try:
        expected = torch.as_tensor(lengths, device=device).reshape(-1)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"lengths must be integers, got {lengths!r}") from None
    if expected.dtype == torch.bool or expected.is_floating_point() or expected.is_complex():
        raise TypeError(f"lengths must be integers, got {lengths!r}")
    if not expected.numel() or expected.min() < 1:
        raise ValueError(f"lengths must be positive, got {lengths!r}")
    with contextlib.ExitStack() as stack:
        for follower in followers:
            stack.enter_context(follower.expecting(expected))
        yield


class GenerateKnowingLengths:
    """A model's own ``generate`` inside ``expecting``, so that most sequences never change their scale."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.own: Callable[..., Any] | None = vars(model).get("generate")
        """A ``generate`` of the instance, as other libraries set."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        announced = self._announced(args, kwargs) if followers_in(self.model) else None
        with contextlib.ExitStack() as stack:
            if announced is not None:
                for follower in followers_in(self.model):
                    stack.enter_context(follower.expecting_generation(*announced))
            if self.own is not None:
                return self.own(*args, **kwargs)
            return type(self.model).generate(self.model, *args, **kwargs)  # type: ignore[attr-defined]

    def _announced(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, int] | None:
        """Return the lengths of the prompts and the room for new tokens; None without a prompt tensor."""
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
            # The rule by which generate itself detects padding.
            is_padded = pad is not None and pad != setting("eos_token_id") and text.dim() == 2
            mask = text != pad if is_padded else torch.ones(text.shape[:2], device=text.device)
        room = 0
        if setting("max_new_tokens") is not None:
            room = setting("max_new_tokens")
        elif setting("max_length") is not None:
            room = max(0, setting("max_length") - text.shape[1])
        reserve = followers_in(self.model)[0].reserve
        room = room if reserve is None else min(room, reserve)
        return mask.long().sum(-1), room
