"""Launches of Triton kernels that cost the host half of Triton's own, and the arithmetic of grids.

Triton looks the compiled kernel up by its arguments' types and values, in Python. A prompt's step has five launches for each
layer: while the host made them, an H100 waited for half of the time of a prompt of 512 tokens of an 8B model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton

Grid = tuple[int, ...]


def cdiv(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up: `triton.cdiv`, which takes microseconds on the host."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not less than `number`, which is positive."""
    return 1 << (number - 1).bit_length()


class Kernel:
    """A kernel that is launched by `kernel[grid](*arguments, **constants)`, where `constants` may hold Triton's options.

    The first launch with arguments of such kinds is Triton's, which compiles.
    """

    def __init__(self, jitted: Any) -> None:
        self.jitted = jitted
        self._compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}
        """Kinds of arguments and constants -> compiled kernel, and the constants in its order."""

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: Grid, *arguments: object, **constants: Any) -> None:
        key = (*map(_kind, arguments), *constants, *constants.values())
        found = self._compiled.get(key)
        if found is None:
            compiled = self.jitted[grid](*arguments, **constants)
            if compiled is not None:  # the interpreter compiles nothing
                self._compiled[key] = compiled, self._in_order(len(arguments), constants)
        else:
            compiled, ordered = found
            compiled[(*grid, 1, 1)](*arguments, *ordered)

    def _in_order(self, num_arguments: int, constants: dict[str, object]) -> tuple[object, ...]:
        """Return the constants as the kernel's signature has them. Raises TypeError for constants that are none there."""
        params = self.jitted.params
        if any(param.is_constexpr != (place >= num_arguments) for place, param in enumerate(params)):
            raise TypeError(f"{self.jitted.__name__}: the constants, and only they, come last and are named")
        return tuple(constants[param.name] for param in params[num_arguments:])


def jit(*, do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Kernel]:
    """Make a function a kernel, by `triton.jit`."""
    return lambda function: Kernel(triton.jit(function, do_not_specialize=do_not_specialize))


def _kind(argument: object) -> object:
    """Return all that Triton may compile another kernel for, or more: type, alignment, whether a number is 1."""
    if isinstance(argument, torch.Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if type(argument) is int:
        return argument == 1, argument % 16 == 0, argument.bit_length() < 32
    return type(argument)
