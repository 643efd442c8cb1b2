"""Launches Triton kernels with less host time than Triton's own launcher, and computes grid sizes.

Triton looks the compiled kernel up by its arguments' types and values, in Python. A prompt's step has five launches for each
layer, and on an H100, launching a 512-token prompt of an 8B model took longer than the GPU's work
(docs/notes/2026-11-27-first-gpu-run.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

Grid = tuple[int, ...]


def cdiv(number: int, divisor: int) -> int:
    """Return number / divisor, rounded up: `triton.cdiv`, which takes microseconds on the host."""
    return -(-number // divisor)


def next_power_of_2(number: int) -> int:
    """Return the least power of two that is not less than `number`, which is positive."""
    return 1 << (number - 1).bit_length()


class Kernel:
    """A kernel that is launched by `kernel[grid](*arguments, **constants)`, where `constants` may hold Triton's options.

    Triton makes the first launch for each kind of arguments, and compiles. All launches are on one device.
    """

    def __init__(self, jitted: Any, constants: Sequence[str]) -> None:
        self.jitted = jitted
        self._constants = tuple(constants)
        """Names of constants, which come last in the signature."""
        self._compiled: dict[tuple[object, ...], tuple[Any, tuple[object, ...]]] = {}
        """Kinds of arguments and constants -> compiled kernel, and the constants in the signature's order."""

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: Grid, *arguments: object, **constants: Any) -> None:
        key = (*map(_kind, arguments), *constants, *constants.values())
        found = self._compiled.get(key)
        if found is None:
            ordered = tuple(constants[name] for name in self._constants)
            compiled = self.jitted[grid](*arguments, **constants)
            if compiled is not None:  # the interpreter compiles nothing
                self._compiled[key] = compiled, ordered
        else:
            compiled, ordered = found
            compiled[(*grid, 1, 1)](*arguments, *ordered)


def jit(*, do_not_specialize: Sequence[str] = ()) -> Callable[[Callable[..., Any]], Kernel]:
    """Make a function a kernel, by `triton.jit`. Raises TypeError if an argument comes after a constant (`tl.constexpr`)."""

    def kernel_of(function: Callable[..., Any]) -> Kernel:
        is_constant = {
            name: parameter.annotation in ("tl.constexpr", tl.constexpr)
            for name, parameter in inspect.signature(function).parameters.items()
        }
        if list(is_constant.values()) != sorted(is_constant.values()):
            raise TypeError(f"{function.__name__}: an argument comes after a constant")
        constants = [name for name, value in is_constant.items() if value]
        return Kernel(triton.jit(function, do_not_specialize=do_not_specialize), constants)

    return kernel_of


def _kind(argument: Any) -> object:
    """Return a key at least as fine as Triton's own: type, alignment, whether a number is 1."""
    kind = type(argument)
    if kind is torch.Tensor:
        return argument.dtype, argument.data_ptr() % 16 == 0
    if kind is int:
        return argument == 1, argument % 16 == 0, argument.bit_length() // 32
    if argument is None or kind is float or kind is bool:
        return kind
    raise TypeError(f"{argument!r} can't be an argument of a kernel")
