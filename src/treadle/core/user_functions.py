"""Checks of user-written functions, and the texts of their errors.

resolved  -check_function-> called as (task, text)? -> ConfigError
called    -call-> "my_losses:mine raised TypeError: ..., at my_losses.py:12; it is called as ..." -> ConfigError
returned  -Expected.refusal-> "my_losses:mine returned a Tensor of shape [], float32; it must return ..., as in ..."
"""

from __future__ import annotations

import inspect
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

import treadle.core
from treadle.core.errors import ConfigError, TreadleError

T = TypeVar("T")

_FOLDERS = sysconfig.get_paths()
_LIBRARIES = (
    f"{Path(treadle.core.__file__).parents[1]}/",
    "<frozen ",
    *(f"{_FOLDERS[name]}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


@dataclass(frozen=True, slots=True)
class Expected:
    """Description of one kind of user function.

    example: two lines of code, the first of which names the parameters. returns: the expected return value, in words.
    """

    example: str
    returns: str = ""

    @property
    def signature(self) -> str:
        """Return `reward(task, text)`."""
        return self.example.partition("def ")[2].partition("):")[0] + ")"

    @property
    def parameters(self) -> list[str]:
        """Return the names of the positional parameters."""
        names = self.signature.partition("(")[2].rstrip(")").split(", ")
        return [name for name in names if name not in ("", "self")]

    @property
    def line(self) -> str:
        """Return the example in one line, for failures of attempts, which are shown on one line."""
        return " ".join(part.strip() for part in self.example.splitlines())

    def refusal(self, function: object, value: object, wrong: str = "", line: bool = False) -> str:
        """Return why the function's return value is refused. wrong: further detail beside its type."""
        what = f"{name_of(function)} returned {described(value)}{wrong and f', {wrong}'}; it must return {self.returns}"
        return f"{what}: {self.line}" if line else f"{what}, as in\n{self.example}"


def check_function(function: object, where: str, expected: Expected, optional: Sequence[str] = ()) -> None:
    """Raise ConfigError, prefixed by `where`, unless the function takes the expected parameters, in order.

    optional: names of further parameters, passed if the function has them.
    """
    if inspect.isclass(function) or not callable(function):
        kind = "a class" if inspect.isclass(function) else f"of type {type(function).__name__}"
        raise ConfigError(f"{where} is {kind}, it must be a function: {expected.signature}, as in\n{expected.example}")
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return
    names, parameters = list(signature.parameters), expected.parameters
    try:
        signature.bind(*parameters, **{name: None for name in optional if name in names})
    except TypeError as error:
        problem = str(error)
    else:
        moved = [name for place, name in enumerate(names) if name in parameters and parameters.index(name) != place]
        if not moved:
            return
        problem = f"{moved[0]!r} is not in that place in ({', '.join(names)})"
    raise ConfigError(
        f"{where} ({name_of(function)}) is called as {expected.signature}, but: {problem}; write\n{expected.example}"
    )


def call(function: Callable[..., T], where: str, expected: Expected, *arguments: Any) -> T:
    """Call the function. An error of the user's code becomes the cause of a ConfigError prefixed by `where`."""
    try:
        return function(*arguments)
    except TreadleError:
        raise
    except Exception as error:
        name = name_of(function)
        # torch's OutOfMemoryError may be raised anywhere and is not the function's fault.
        if name.startswith("treadle.") or type(error).__name__ == "OutOfMemoryError":
            raise
        place = "".join(f", at {line}" for line in user_lines(error.__traceback__)[-1:])
        raise ConfigError(
            f"{where}: {name} raised {type(error).__name__}: {error}{place}; it is called as "
            f"{expected.signature}, as in\n{expected.example}"
        ) from error


def user_lines(traceback: TracebackType | None) -> list[str]:
    """Return the lines outside Treadle and installed libraries, innermost last: `my.py:12 in mine`."""
    lines = ((frame.f_code, line) for frame, line in walk_tb(traceback))
    return [f"{code.co_filename}:{line} in {code.co_name}" for code, line in lines if not is_library(code.co_filename)]


def is_library(file: str) -> bool:
    """Return whether a source file belongs to Treadle or an installed library."""
    return file.startswith(_LIBRARIES) or any(folder in file for folder in ("/site-packages/", "/dist-packages/"))


def name_of(function: object) -> str:
    """Return `module:qualname` of a function, or of an object's class."""
    while isinstance(function, partial):
        function = function.func
    named: Any = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}"


def described(value: object) -> str:
    """Return `a Tensor of shape [3], float32` for an array or a tensor; `None, a NoneType` for anything else."""
    kind, array = type(value).__name__, all(hasattr(value, name) for name in ("shape", "dtype"))
    if array and not np.isscalar(value):
        return f"a {kind} of shape {list(value.shape)}, {str(value.dtype).removeprefix('torch.')}"  # type: ignore[attr-defined]
    return f"{value!r:.100}, a {kind}"


def not_finite(numbers: NDArray[Any], at: NDArray[np.bool_] | None = None) -> str:
    """Return `nan at index 4` for the first non-finite number; "" if there is none. at: mask of numbers to check."""
    wrong = ~np.isfinite(numbers) if at is None else ~np.isfinite(numbers) & at
    if not wrong.any():
        return ""
    first = int(np.flatnonzero(wrong)[0])
    return f"{numbers[first]} at index {first}"
