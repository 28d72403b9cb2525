"""Data: batches of tokens from whatever the user has.

A token tensor ``[batch, pos]`` (rows drawn at random where a batch size is given), an iterable of batches (started again when
it ends), or a function ``(step, generator) -> batch``. A batch is a token tensor or a pair ``(tokens, attention_mask)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from tl_spd.sites import HookedTransformer, d_vocab, host_device, n_ctx


def check_batch(batch: Any, model: HookedTransformer) -> tuple[Int[Tensor, "batch pos"], Tensor | None]:
    """``(tokens, attention_mask)`` on the host's device.

    Raises:
        TypeError: not a token tensor or a pair of tensors.
        ValueError: an empty batch, tokens outside the vocabulary, or a prompt longer than the host's context.
    """
    tokens, mask = batch if isinstance(batch, tuple | list) and len(batch) == 2 else (batch, None)
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
    if mask is not None and mask.shape != tokens.shape:
        raise ValueError(f"attention_mask has shape {tuple(mask.shape)}; wanted that of the tokens, {tuple(tokens.shape)}.")
    device = host_device(model)
    return tokens.to(device), None if mask is None else mask.to(device)


def _describe(value: Any) -> str:
    return f"a tensor of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


class Batches:
    """``batches(step, generator)`` gives ``(tokens, attention_mask)`` for every step."""

    def __init__(self, data: Any, model: HookedTransformer, batch_size: int | None = None):
        self.data, self.model, self.batch_size = data, model, batch_size
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, found {batch_size}.")
        if isinstance(data, Tensor):
            check_batch(data, model)
        elif not callable(data) and not isinstance(data, Iterable):
            raise TypeError(
                "data must be a token tensor, an iterable of batches or a function (step, generator) -> batch, found "
                f"{_describe(data)}."
            )
        self._iterator: Iterator[Any] | None = None
        self._taken = 0

    def __call__(self, step: int, generator: torch.Generator) -> tuple[Int[Tensor, "batch pos"], Tensor | None]:
        """The batch of ``step``; ``generator`` draws rows or is handed to the user's function."""
        return check_batch(self._raw(step, generator), self.model)

    def _raw(self, step: int, generator: torch.Generator) -> Any:
        if isinstance(self.data, Tensor):
            if self.batch_size is None or self.batch_size >= self.data.shape[0]:
                return self.data
            return self.data[torch.randperm(self.data.shape[0], generator=generator)[: self.batch_size].to(self.data.device)]
        if callable(self.data):
            return self.data(step, generator)
        while self._taken < step:  # resuming: the batches before this step have been used
            self._next()
        return self._next()

    def _next(self) -> Any:
        self._taken += 1
        if self._iterator is None:
            self._iterator = iter(self.data)
        for batch in self._iterator:
            return batch
        self._iterator = iter(self.data)
        for batch in self._iterator:
            return batch
        raise ValueError(
            f"The data ended after {self._taken - 1} batches and cannot be started again; give a list, a DataLoader or a "
            "function (step, generator) -> batch."
        )
