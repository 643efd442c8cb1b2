"""Users' own policies: loads the class that `package.module:Class` or `./file.py:Class` names, and checks it.

Mistakes are reported when a class is loaded. While it runs, a guard turns exceptions and wrong answers into a `PolicyError`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Mapping
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import Parameter, getattr_static, signature
from posixpath import abspath
from traceback import walk_tb
from types import ModuleType
from typing import Any, get_type_hints
from warnings import warn

from penstock.sched.policies.base import (
    BudgetView,
    GateDecision,
    GateView,
    Guess,
    Guesser,
    Order,
    Policies,
    StepLimits,
    VictimView,
)
from penstock.types.errors import ConfigError, PolicyError
from penstock.types.plan import Capacity
from penstock.types.request import Request

SEAM_FLAGS: Mapping[str, str] = {
    "gate": "--batching",
    "order": "--policy",
    "budget": "--budget",
    "reserve": "--reserve",
    "victim": "--victim",
    "predictor": "--length-predictor",
    "eviction": "--kv-eviction",
    "guesser": "--speculation",
}
"""Seam -> the flag that names its policy, in the server and the lab."""
SEAMS: Mapping[str, type] = {seam: get_type_hints(Policies)[seam] for seam in SEAM_FLAGS}
"""Seam -> its contract. Abstract methods are required; all else has a default."""


class OwnPolicyError(ConfigError):
    def __init__(self, seam: str, name: str, cause: str, *, remedy: str = "", argument: str = "") -> None:
        """`argument`: name of the argument that the policy does not accept."""
        super().__init__(f"The {seam} {name!r} {cause}", remedy=remedy)
        self.seam, self.argument = seam, argument


# Loading.


def is_own(name: str) -> bool:
    """Return whether a policy's name is that of a user's class, such as `./file.py:Class`."""
    return ":" in name


def load(seam: str, name: str) -> Callable[..., object]:
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        remedy = "Write package.module:Class, or ./file.py:Class for a file."
        raise OwnPolicyError(seam, name, "is not the name of a class.", remedy=remedy)
    try:
        module = _load_file(abspath(where)) if where.endswith(".py") else import_module(where)
    except Exception as error:
        raise _not_loaded(seam, name, where, error) from error
    found: object = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        close = get_close_matches(attribute, own, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        cause = f"was not found: {where} has no class {attribute}."
        raise OwnPolicyError(seam, name, cause, remedy=f"{hint}It has: {', '.join(own) or 'none'}.")
    return found


def _load_file(path: str) -> ModuleType:
    """Load a user's file once, so that its policies and later engines share the module."""
    spec = spec_from_file_location(f"penstock own policy {path}", path)
    assert spec is not None, "a path that ends in .py has a loader"
    assert spec.loader is not None, "as above"
    if spec.name not in sys.modules:
        module = sys.modules[spec.name] = module_from_spec(spec)  # dataclasses look their module up
        try:
            spec.loader.exec_module(module)
        except Exception:
            del sys.modules[spec.name]
            raise
    return sys.modules[spec.name]


def _not_loaded(seam: str, name: str, where: str, error: Exception) -> OwnPolicyError:
    if isinstance(error, FileNotFoundError) and where.endswith(".py") and error.filename == abspath(where):
        remedy = "Give its path relative to the folder in which Penstock is started."
        return OwnPolicyError(seam, name, f"was not found: there is no file {error.filename}.", remedy=remedy)
    if isinstance(error, ModuleNotFoundError) and f"{where}.".startswith(f"{error.name}."):
        cause = f"was not found: there is no module {error.name} where Python looks for modules."
        remedy = "Install it, add its folder to PYTHONPATH, or give the file itself, as in ./my_policy.py:Class."
        return OwnPolicyError(seam, name, cause, remedy=remedy)
    remedy = f"Try it alone: python {where}." if where.endswith(".py") else ""
    return OwnPolicyError(seam, name, f"can't be loaded: {where} raises {_told(error)}.", remedy=remedy)


def make(seam: str, name: str, factory: Callable[..., object], arguments: Mapping[str, object]) -> object:
    """Return the policy object that a user's class makes of its arguments. Raises OwnPolicyError."""
    for key in sorted(getattr(factory, "__abstractmethods__", ())):
        raise _lacks(seam, name, key)
    given = _checked_arguments(seam, name, factory, arguments)
    try:
        return factory(**given)
    except ConfigError:
        raise
    except Exception as error:
        cause = f"can't be made of its arguments: {_told(error)}."
        raise OwnPolicyError(seam, name, cause, remedy="Its constructor raised this.") from error


def _told(error: Exception) -> str:
    """Return the error's message, with the line of the user's file that raised it."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [(path, line) for path, line in frames if path != __file__ and not path.startswith("<")]
    lines = [line for path, line in own if path == own[0][0]]
    return f"{type(error).__name__}: {error}" + (f" ({own[0][0]}, line {lines[-1]})" if lines else "")


def _lacks(seam: str, name: str, method: str) -> OwnPolicyError:
    contract = SEAMS[seam]
    shape = f"{method}({', '.join(signature(getattr(contract, method)).parameters)})"
    remedy = f"Define it as {shape}, as {contract.__module__}.{contract.__name__} says."
    return OwnPolicyError(seam, name, f"has no method {method}, which the scheduler calls.", remedy=remedy)


def parameters_of(factory: Callable[..., object]) -> Mapping[str, Parameter]:
    """Return the parameters that a policy class takes by name. Empty for a class in C without a signature."""
    if getattr(factory, "__init__", None) is getattr(Order, "__init__"):  # noqa: B009  # a class without one inherits Protocol's
        return {}
    if all(getattr(factory, name, None) is getattr(object, name) for name in ("__init__", "__new__")):
        return {}  # as `signature` says, which parses a text for it and leaves half a megabyte to the garbage collector
    try:
        parameters = signature(factory).parameters
    except ValueError:
        return {}
    unnamed = (Parameter.POSITIONAL_ONLY, Parameter.VAR_POSITIONAL)
    return {key: value for key, value in parameters.items() if value.kind not in unnamed and not key.startswith("_")}


def _checked_arguments(
    seam: str, name: str, factory: Callable[..., object], arguments: Mapping[str, object]
) -> dict[str, object]:
    parameters = parameters_of(factory)
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters.values())
    named = {key: parameter for key, parameter in parameters.items() if parameter.kind is not Parameter.VAR_KEYWORD}
    takes = f"It takes: {', '.join(map(_shown_parameter, named.values())) or 'no arguments'}."
    given = dict(arguments)
    for key, value in arguments.items():
        if key not in named:
            if takes_any:
                continue
            raise OwnPolicyError(seam, name, f"takes no argument {key}.", remedy=takes, argument=key)
        kind = _kind(named[key])
        if kind is tuple and isinstance(value, list):
            given[key] = tuple(value)
        elif kind is float and type(value) is int:
            given[key] = float(value)
        elif kind in (bool, int, float, str) and type(value) is not kind:
            wanted = getattr(kind, "__name__", kind)
            raise OwnPolicyError(seam, name, f"takes {wanted} for {key}, not {type(value).__name__}.", remedy=takes)
    missing = [key for key, parameter in named.items() if parameter.default is Parameter.empty and key not in given]
    if missing:
        raise OwnPolicyError(seam, name, f"needs the argument {missing[0]}, which is not given.", remedy=takes)
    return given


def _kind(parameter: Parameter) -> object:
    if parameter.default not in (Parameter.empty, None):
        return type(parameter.default)
    return {"bool": bool, "int": int, "float": float, "str": str}.get(parameter.annotation, parameter.annotation)


def _shown_parameter(parameter: Parameter) -> str:
    return parameter.name if parameter.default is Parameter.empty else f"{parameter.name} = {parameter.default!r}"


# Guarding.


def guarded(seam: str, policy: object, name: str = "") -> object:
    """Return a user's own policy wrapped in a guard, and any other policy as it is. Raises OwnPolicyError."""
    kind = type(policy)
    name = name or f"{kind.__module__}:{kind.__qualname__}"
    seams = [other for other, contract in SEAMS.items() if contract in kind.__mro__]
    if seams and seam not in seams:
        cause = f"is of another kind: its class inherits from {SEAMS[seams[0]].__name__}."
        raise OwnPolicyError(seam, name, cause, remedy=f"Use {SEAM_FLAGS[seams[0]]}; in Python, {seams[0]}=.")
    return policy if kind.__module__.startswith("penstock.") else _Guard(seam, policy, name)


class _Guard:
    """Wraps a user's own policy: same methods and flags, with every call checked."""

    def __init__(self, seam: str, policy: object, name: str) -> None:
        self._seam, self._policy, self.policy_name = seam, policy, name
        contract = {key: default for key, default in vars(SEAMS[seam]).items() if not key.startswith("_")}
        required: frozenset[str] = getattr(SEAMS[seam], "__abstractmethods__", frozenset())
        own: set[str] = set()
        for key, default in contract.items():
            if not hasattr(policy, key) and key in required:
                raise _lacks(seam, name, key)
            if hasattr(policy, key) and getattr_static(type(policy), key, None) is not default:
                own.add(key)
            if callable(default):
                call = getattr(policy, key) if hasattr(policy, key) else default.__get__(self)
                setattr(self, key, self._guarded(key, call, default) if key in own else call)
            else:
                setattr(self, key, getattr(policy, key, default))
        if seam == "guesser":
            self.source = Guesser.source  # a label of metrics, whatever else the class calls so
        if "outranks" in own and not getattr(policy, "has_ranks", False):
            remedy = "Say has_ranks = True in its class, or leave outranks out."
            raise OwnPolicyError(seam, name, "defines outranks, but it is never called.", remedy=remedy)
        for key in sorted({*dir(type(policy))} - contract.keys()):
            for close in get_close_matches(key, contract.keys() - own, n=1, cutoff=0.8):
                warn(f"The {seam} {name!r} has {key}, which is never used. Did you mean {close}?", stacklevel=2)

    def __getattr__(self, key: str) -> object:
        return getattr(object.__getattribute__(self, "_policy"), key)

    def _guarded(self, key: str, call: Callable[..., object], contract: Callable[..., object]) -> Callable[..., object]:
        parameters = list(signature(contract).parameters)[1:]
        try:
            signature(call).bind(*parameters)
        except TypeError:
            cause = f"has a method {key} that does not take the arguments of the call."
            remedy = f"Define it as {key}({', '.join(['self', *parameters])})."
            raise OwnPolicyError(self._seam, self.policy_name, cause, remedy=remedy) from None
        except ValueError:  # a function in C that does not say what it takes
            pass
        check: Callable[..., str] = _CHECKS.get((self._seam, key), lambda *_: "")

        @wraps(call)
        def guarded_call(*arguments: object) -> object:
            try:
                answer = call(*arguments)
                wanted = check(answer, *arguments)
            except (ConfigError, PolicyError):
                raise
            except Exception as error:
                raise PolicyError(self._seam, self, f"failed in {key}: {_told(error)}") from error
            if wanted:
                # Never a prompt, which a request would show in the log.
                is_shown = isinstance(answer, int | float | str | GateDecision | StepLimits | None)
                shown = repr(answer)[:200] if is_shown else f"something of type {type(answer).__name__}"
                raise PolicyError(self._seam, self, f"returned {shown} from {key}, but must return {wanted}")
            return answer

        return guarded_call


# What each method must return: a check returns it in words if the value is wrong, else "".


def _check_decision(answer: Any, view: GateView) -> str:
    if not isinstance(answer, GateDecision):
        return "a GateDecision"
    if answer.max_admissions < 1:
        if answer.wakeup_ns is None and not view.num_running + view.num_joining:
            return "a wakeup_ns, since no request of these runs and the gate might never be called again"
        is_late = answer.wakeup_ns is not None and answer.wakeup_ns <= view.now_ns
        return f"a wakeup_ns after now ({view.now_ns}), or None" if is_late else ""
    buckets = [bucket.bucket for bucket in view.buckets]
    if answer.bucket not in buckets:
        return f"a bucket of the view, {buckets}"
    if answer.is_batch and view.num_running + view.num_joining:
        return "no batch while requests run or join"
    if answer.is_batch and answer.max_admissions > view.max_rows:
        return f"a batch of at most {view.max_rows} requests"
    return ""


def _check_limits(answer: Any, view: BudgetView) -> str:
    if not isinstance(answer, StepLimits):
        return "StepLimits"
    least = 0 if view.num_decodes else 1
    if type(answer.max_tokens) is not int or not least <= answer.max_tokens <= view.max_step_tokens:
        return f"max_tokens from {least} to {view.max_step_tokens}"
    if not answer.most_ns > 0:
        return "a most_ns above 0"
    if not 0 < answer.decode_tokens < math.inf:
        return "a finite decode_tokens above 0"
    share, counts = answer.long_prefill_share, [answer.long_prefill_tokens, answer.fill_tokens]
    counts += [answer.max_chunk_tokens, answer.max_long_prefills, 0 if share is None else share]
    if any(type(number) is not int for number in counts):
        return "whole numbers of tokens and prefills"
    is_possible = answer.max_chunk_tokens >= 1 and answer.max_long_prefills >= 1
    return "" if is_possible else "max_chunk_tokens and max_long_prefills of at least 1"


def _check_victim(answer: Any, view: VictimView) -> str:
    return "" if any(answer is one for one in view.candidates) else "one of the candidates of the view"


def _check_max_running(answer: Any, capacity: Capacity) -> str:
    most = min(capacity.max_rows, capacity.max_step_tokens)
    return "" if type(answer) is int and 1 <= answer <= most else f"a number of requests from 1 to {most}"


def _check_key(answer: Any, *_: object) -> str:
    # A part that does not equal itself (NaN) would be asked for again without end.
    is_key = isinstance(answer, tuple) and all(isinstance(part, int | float) and part == part for part in answer)
    return "" if is_key else "a tuple of numbers"


def _check_prediction(answer: Any, *_: object) -> str:
    return "" if answer is None or (type(answer) is int and answer >= 1) else "a number of tokens, at least 1, or None"


def _check_guess(answer: Any, request: Request, most: int) -> str:
    del request
    if answer is None:
        return ""
    is_guess = isinstance(answer, Guess) and len(answer.token_ids) <= most and type(answer.num_matched) is int
    is_possible = is_guess and answer.num_matched >= 1 and all(type(token) is int for token in answer.token_ids)
    return "" if is_possible else f"a Guess of at most {most} token ids with a whole num_matched of at least 1, or None"


def _of_type(kind: type, words: str) -> Callable[..., str]:
    return lambda answer, *_: "" if isinstance(answer, kind) else words


_CHECKS: Mapping[tuple[str, str], Callable[..., str]] = {
    ("gate", "max_running"): _check_max_running,
    ("gate", "bucket_of"): _of_type(int, "a number"),
    ("gate", "decide"): _check_decision,
    ("order", "key"): _check_key,
    ("order", "lane"): _of_type(str, "a text"),
    ("order", "lane_key"): _check_key,
    ("budget", "limits"): _check_limits,
    ("reserve", "required_blocks"): _of_type(int, "a whole number of blocks"),
    ("victim", "choose"): _check_victim,
    ("predictor", "predict"): _check_prediction,
    ("eviction", "group_of"): _of_type(Hashable, "something that can be a key of a dict"),
    ("eviction", "choose"): _of_type(Hashable, "a group that has blocks"),
    ("guesser", "guess"): _check_guess,
}
"""The checks of answers. Keys that shrink, groups without blocks and tokens that do not exist are found where they are used."""
