"""Data: batches of tokens from whatever the user has.

A token tensor ``[batch, pos]``, alone or in a tuple ``(tokens, attention_mask)`` (rows drawn at random where a batch size is
given); an iterable of batches (started again when it ends); or a function ``(step, generator) -> batch``. A batch is a token
tensor or a pair ``(tokens, attention_mask)``, with 1 at real tokens and 0 at padding.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_spd.sites import HookedTransformer, d_vocab, host_device, n_ctx
from tl_spd.wiring import padding_mask


def check_batch(batch: Any, model: HookedTransformer) -> tuple[Int[Tensor, "batch pos"], Tensor | None]:
    """``(tokens, attention_mask)`` on the host's device.

    Raises:
        TypeError: not a token tensor or a pair of tensors.
        ValueError: an empty batch, tokens outside the vocabulary, a prompt longer than the host's context, or a mask that
            does not fit or holds something else than 0 and 1.
    """
    parts = batch if isinstance(batch, tuple | list) and len(batch) in (1, 2) else (batch,)
    tokens, mask = (*parts, None)[:2]  # a DataLoader over a TensorDataset gives lists of one tensor
    if not isinstance(tokens, Tensor) or tokens.is_floating_point() or tokens.dtype == torch.bool:
        raise TypeError(
            f"A batch must be an integer tensor of tokens [batch, pos] or a pair (tokens, attention_mask), found "
            f"{_describe(tokens)}. model.to_tokens(prompts) makes one from text."
        )
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise ValueError(f"A batch must be [batch, pos] with at least one token, found shape {tuple(tokens.shape)}.")
    if tokens.shape[1] > n_ctx(model):
        raise ValueError(f"The host takes at most {n_ctx(model)} tokens, found prompts of {tokens.shape[1]}.")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= d_vocab(model):
        raise ValueError(f"Tokens must be 0 to {d_vocab(model) - 1}, found {low} to {high}.")
    device = host_device(model)
    return tokens.to(device, torch.long), None if mask is None else _check_mask(mask, tokens).to(device, torch.long)


def check_scored(tokens: Int[Tensor, "batch pos"], scored: Tensor) -> None:
    """ValueError where ``scored``, the positions of ``tokens`` that are scored, names none."""
    if not len(scored):
        raise ValueError(f"No position of this batch {tuple(tokens.shape)} is scored: it is empty or all padding.")


def _check_known(batch: Any, model: HookedTransformer) -> None:
    """:func:`check_batch`, and that the batch is not all padding: of what is known before training."""
    tokens, mask = check_batch(batch, model)
    real = padding_mask(model, tokens, mask)
    if real is not None:
        check_scored(tokens, real.nonzero())


def _check_mask(mask: Any, tokens: Tensor) -> Tensor:
    if not isinstance(mask, Tensor):
        raise TypeError(f"attention_mask must be a tensor of 0 and 1, found {_describe(mask)}.")
    if mask.shape != tokens.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; wanted that of the tokens, {tuple(tokens.shape)}."
        )
    if not bool(((mask == 0) | (mask == 1)).all()):
        raise ValueError("attention_mask must be 1 at real tokens and 0 at padding, found other values.")
    return mask


def _describe(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


def _is_pair(data: Any) -> bool:
    """Whether ``data`` is ``(tokens, attention_mask)`` rather than a sequence of batches."""
    return (
        isinstance(data, tuple)
        and len(data) == 2
        and isinstance(data[0], Tensor)
        and isinstance(data[1], Tensor | None)
    )


class Batches:
    """``batches(step, generator)`` gives ``(tokens, attention_mask)`` for every step."""

    def __init__(self, data: Any, model: HookedTransformer, batch_size: int | None = None):
        self.data, self.model, self.batch_size = data, model, batch_size
        self.whole = isinstance(data, Tensor) or _is_pair(data)
        if self.whole:
            _check_known(data, model)
        elif isinstance(data, Sequence):
            if not data:
                raise ValueError("data is empty; give at least one batch.")
            for batch in data if isinstance(data, list | tuple) else data[:1]:
                _check_known(batch, model)
        elif not callable(data) and not isinstance(data, Iterable):
            raise TypeError(
                "data must be a token tensor, an iterable of batches or a function (step, generator) -> batch, found "
                f"{_describe(data)}."
            )
        if batch_size is not None and not self.whole:
            raise ValueError(
                "batch_size draws rows of one token tensor; other data must come in batches of the wanted size."
            )
        self._iterator: Iterator[Any] | None = None
        self._taken = 0
        self._first: tuple[Any, Tensor] | None = None
        """The batch of step 0 where it was asked for beforehand, and the generator's state behind it."""

    def digest(self) -> str | None:
        """SHA-256 (16 hexadecimal digits) of every batch's tokens and mask; None where batches are made on the way."""
        if not self.whole and not isinstance(self.data, list | tuple):
            return None
        known = hashlib.sha256()
        for batch in (self.data,) if self.whole else self.data:
            tokens, mask = (*(batch if isinstance(batch, tuple | list) else (batch,)), None)[:2]
            for part in (tokens, None if mask is None or bool(mask.all()) else mask):
                known.update(f"{None if part is None else tuple(part.shape)};".encode())
                if part is not None:
                    known.update(part.detach().to("cpu", torch.long).contiguous().numpy())
        return known.hexdigest()[:16]

    def __call__(self, step: int, generator: torch.Generator) -> tuple[Int[Tensor, "batch pos"], Tensor | None]:
        """The batch of ``step``; ``generator`` draws rows or is handed to the user's function."""
        if step == 0 and self._first is not None:
            (batch, state), self._first = self._first, None
            generator.set_state(state)
            return check_batch(batch, self.model)
        return check_batch(self._raw(step, generator), self.model)

    def first(self, generator: torch.Generator) -> tuple[Int[Tensor, "batch pos"], Tensor | None]:
        """The batch of step 0, which stays to be taken; ``generator`` must stand as it will at that step."""
        if self._first is None:
            self._first = self._raw(0, generator), generator.get_state()
        return check_batch(self._first[0], self.model)

    def _raw(self, step: int, generator: torch.Generator) -> Any:
        if self.whole:
            return self._rows(generator)
        if callable(self.data):
            return self.data(step, generator)
        while self._taken < step:  # resuming: the batches before this step have been used
            self._next()
        return self._next()

    def _rows(self, generator: torch.Generator) -> Any:
        parts = (self.data,) if isinstance(self.data, Tensor) else self.data
        count = parts[0].shape[0]
        if self.batch_size is None or self.batch_size >= count:
            return parts
        chosen = torch.randperm(count, generator=generator)[: self.batch_size]
        return tuple(None if part is None else part[chosen.to(part.device)] for part in parts)

    def _next(self) -> Any:
        for _ in range(2):  # where the data has ended, once more from its start
            self._iterator = iter(self.data) if self._iterator is None else self._iterator
            for batch in self._iterator:
                self._taken += 1
                return batch
            self._iterator = None
        raise ValueError(
            f"The data ended after {self._taken} batches and cannot be started again; give a list, a DataLoader or a "
            "function (step, generator) -> batch."
        )
