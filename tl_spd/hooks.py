"""Hooks on a host: put on, and taken away to the last one, also after an interrupt while they were put on or taken away.

1. A hook is noted before it is put on. Taking away looks for what was noted, so it can be cut short anywhere and repeated.
2. What writes at a hook point does so as a hook on its input, ahead of all hooks of the point. In the host's own list of
   hooks a mark stands for it, so that whoever empties that list is noticed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tl_spd.sites import HookedTransformer, HookPoint, LensHandle


def _mark() -> Callable[..., None]:
    def masked_by_tl_spd(*_: Any) -> None:
        """Stands in the host's list of hooks for a masked output; removing it counts as taking the Run out."""

    return masked_by_tl_spd


@dataclass(eq=False)
class HookSet:
    """Hooks on a host. Each is noted before it is put on, so that ``remove`` finds all of them, whatever was cut short."""

    mark: Callable[..., None] = field(default_factory=_mark)
    _points: list[HookPoint] = field(default_factory=list)
    _placed: list[tuple[nn.Module, Any]] = field(default_factory=list)

    def put(self, register: Any, function: Any, **kwargs: Any) -> RemovableHandle:
        """``register(function)`` for a module's method ``register_forward_hook`` or ``register_forward_pre_hook``."""
        self._placed.append((register.__self__, function))
        return register(function, **kwargs)

    def add(self, model: HookedTransformer, name: str, function: Callable[..., Tensor | None]) -> None:
        """Let a writing hook write at the hook point ``name``, behind earlier installations (the innermost wins).

        It writes ahead of all hooks of the point, as its input, so that backward hooks see it too.
        """
        point = model.hook_dict[name]
        self._points.append(point)
        handle = self.put(point.register_forward_hook, self.mark)
        point.fwd_hooks.append(LensHandle(handle, is_permanent=True, user_hook=self.mark))
        self.put(
            point.register_forward_pre_hook,
            lambda reached, args: (
                function(*args, hook=point) if reached is point else None
            ),  # not in copies of the host
        )

    def missing(self) -> list[str]:
        """Names of hook points from which somebody else has removed our hook."""
        return [str(point.name) for point in self._points if self.mark not in point._forward_hooks.values()]

    def entries(self) -> list[tuple[dict[int, Any], int]]:
        """The modules' tables of hooks with the keys of those that were added; a hook comes behind what tells of it."""
        found: list[tuple[dict[int, Any], int]] = []
        for module, function in self._placed:
            for table, told in (
                (module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs),
                (module._forward_hooks, module._forward_hooks_with_kwargs),
            ):
                for key in [key for key, hook in table.items() if hook is function]:
                    found += [(told, key), (table, key)]
        return found

    def remove(self) -> None:
        """Remove exactly the hooks that were added. What was cut short can be repeated."""
        for point in self._points:
            point.fwd_hooks[:] = [handle for handle in point.fwd_hooks if handle.user_hook is not self.mark]
        for table, key in self.entries():
            table.pop(key, None)
        self._points.clear()
        self._placed.clear()


@contextmanager
def removing(hooks: HookSet) -> Iterator[HookSet]:
    """Inside this context hooks may be put on through ``hooks``; none is left afterwards."""
    try:
        try:
            yield hooks
        finally:
            hooks.remove()
    finally:
        hooks.remove()  # once more, where an interrupt cut the first short
