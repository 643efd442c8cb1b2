"""Policies of a user's own: from `package.module:Class` or `./file.py:Class` to a policy that the scheduler can rely on.

Called by `presets` for a policy that is in no table. Everything that can be wrong with such a class before it runs is said when
it is loaded, with the cause and the remedy. While it runs, a guard around it turns what it raises, and answers that would break
the scheduler, into a `PolicyError` that names it. Policies that ship are called directly.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from difflib import get_close_matches
from functools import wraps
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from inspect import Parameter, getattr_static, signature
from posixpath import abspath
from traceback import walk_tb
from types import ModuleType
from typing import get_type_hints
from warnings import warn

from penstock.sched.policies.base import (
    BudgetView,
    Eviction,
    GateDecision,
    GateView,
    Order,
    OrderKey,
    Policies,
    Prediction,
    StepLimits,
    VictimView,
)
from penstock.types.errors import ConfigError, PenstockError
from penstock.types.plan import Capacity
from penstock.types.request import Request

UNNAMED = "<own>:"
"""The file or module of a user's policy where its name is not told, as in recordings; its class follows."""
SEAM_FLAGS: Mapping[str, str] = {
    "gate": "--batching",
    "order": "--policy",
    "budget": "--budget",
    "reserve": "--reserve",
    "victim": "--victim",
    "predictor": "--length-predictor",
    "eviction": "--kv-eviction",
}
"""Seam -> the flag that names its policy, of the server and of the lab."""
SEAMS: Mapping[str, type] = {seam: get_type_hints(Policies)[seam] for seam in SEAM_FLAGS}
"""Seam -> its contract. Abstract methods are required; all else has a default."""


class OwnPolicyError(ConfigError):
    """A policy can't be loaded or made: the user's class, or the arguments that were given for it."""

    def __init__(self, seam: str, name: str, cause: str, *, remedy: str = "", argument: str = "") -> None:
        """`argument`: the one that the policy does not take."""
        super().__init__(f"The {seam} {name!r} {cause}", remedy=remedy)
        self.seam, self.argument = seam, argument


class PolicyError(PenstockError):
    """A policy of the user's own failed, or gave an answer that it must not give, while the scheduler asked it."""


# Loading.


def is_own(name: str) -> bool:
    """True if this names a class of the user's, not an entry of a table."""
    return ":" in name


def load(seam: str, name: str) -> Callable[..., object]:
    """The class, or the function that makes the policy. Raises OwnPolicyError."""
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise OwnPolicyError(
            seam, name, "is no name of a class.", remedy="Write package.module:Class, or ./file.py:Class for a file."
        )
    module = _load_file(seam, name, where) if where.endswith(".py") else _load_module(seam, name, where)
    found: object = module
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        close = get_close_matches(attribute, own, n=1)
        hint = f"Did you mean {close[0]}? " if close else ""
        raise OwnPolicyError(
            seam, name, f"was not found: {where} has no class {attribute}.", remedy=f"{hint}It has: {', '.join(own) or 'none'}."
        )
    return found


def _load_module(seam: str, name: str, where: str) -> ModuleType:
    try:
        return import_module(where)
    except ModuleNotFoundError as error:
        if error.name is not None and (where == error.name or where.startswith(error.name + ".")):
            raise OwnPolicyError(
                seam,
                name,
                f"was not found: there is no module {error.name} where Python looks for modules.",
                remedy="Install it, add its folder to PYTHONPATH, or give the file itself, as in ./my_policy.py:Class.",
            ) from None
        raise _import_failed(seam, name, where, error) from error
    except Exception as error:
        raise _import_failed(seam, name, where, error) from error


def _load_file(seam: str, name: str, path: str) -> ModuleType:
    """A file is loaded once: two policies in it share what it holds, and an engine that is made anew finds the same classes."""
    path = abspath(path)
    spec = spec_from_file_location(f"penstock own policy {path}", path)
    assert spec is not None, "a path that ends in .py has a loader"
    assert spec.loader is not None, "as above"
    if spec.name in sys.modules:
        return sys.modules[spec.name]
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError as error:
        del sys.modules[spec.name]
        if error.filename != spec.origin:
            raise _import_failed(seam, name, path, error) from error
        raise OwnPolicyError(
            seam,
            name,
            f"was not found: there is no file {spec.origin}.",
            remedy="Give its path as seen from the folder in which Penstock is started.",
        ) from None
    except Exception as error:
        del sys.modules[spec.name]
        raise _import_failed(seam, name, path, error) from error
    return module


def _import_failed(seam: str, name: str, where: str, error: Exception) -> OwnPolicyError:
    cause = f"can't be loaded: {where} raises {_told(error)}"
    return OwnPolicyError(seam, name, cause, remedy=f"Try it alone: python {where}." if where.endswith(".py") else "")


def make(seam: str, name: str, factory: Callable[..., object], arguments: Mapping[str, object]) -> object:
    """The policy that a class makes of its arguments, as a file of settings has them. Raises OwnPolicyError."""
    for key in sorted(getattr(factory, "__abstractmethods__", ())):
        raise _lacks(seam, name, key)
    given = _checked_arguments(seam, name, factory, arguments)
    try:
        return factory(**given)
    except ConfigError:
        raise
    except Exception as error:
        cause = f"can't be made of its arguments: {_told(error)}"
        raise OwnPolicyError(seam, name, cause, remedy="Its constructor raised this.") from error


def _told(error: Exception) -> str:
    """The error with the line of the user's file that raised it, or called what raised it."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    own = [(path, line) for path, line in frames if path != __file__ and not path.startswith("<")]
    lines = [line for path, line in own if path == own[0][0]]
    return f"{type(error).__name__}: {error}" + (f" ({own[0][0]}, line {lines[-1]})" if lines else "")


def _lacks(seam: str, name: str, method: str) -> OwnPolicyError:
    contract = SEAMS[seam]
    shape = f"{method}({', '.join(signature(getattr(contract, method)).parameters)})"
    remedy = f"Define it as {shape}, as {contract.__module__}.{contract.__name__} says."
    return OwnPolicyError(seam, name, f"has no method {method}, which the scheduler asks.", remedy=remedy)


def parameters_of(factory: Callable[..., object]) -> Mapping[str, Parameter]:
    """The parameters that can be given by name; empty for a class in C that does not say."""
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
    """The type of a parameter, by its default or its annotation."""
    if parameter.default not in (Parameter.empty, None):
        return type(parameter.default)
    return {"bool": bool, "int": int, "float": float, "str": str}.get(parameter.annotation, parameter.annotation)


def _shown_parameter(parameter: Parameter) -> str:
    return parameter.name if parameter.default is Parameter.empty else f"{parameter.name} = {parameter.default!r}"


# Guarding.


def guarded(seam: str, policy: object, name: str = "") -> object:
    """A policy of the user's own behind a guard; one that ships as it is.

    Raises OwnPolicyError if it lacks a method that its seam needs, if a method can't take the arguments of the call, or if it
    inherits from the class of another seam.
    """
    kind = type(policy)
    name = name or f"{kind.__module__}:{kind.__qualname__}"
    kinds = [other for other, contract in SEAMS.items() if contract in kind.__mro__]
    if kinds and seam not in kinds:
        cause = f"answers another question: its class inherits from {SEAMS[kinds[0]].__name__}."
        raise OwnPolicyError(seam, name, cause, remedy=f"Use {SEAM_FLAGS[kinds[0]]}; in Python, {kinds[0]}=.")
    return policy if kind.__module__.startswith("penstock.") else _Guard(seam, policy, name)


class _Guard:
    """Stands before a policy of the user's own, with each method and each flag of its seam as an attribute."""

    lane: Callable[[Request], str]

    def __init__(self, seam: str, policy: object, name: str) -> None:
        self._seam, self._policy, self._name = seam, policy, name
        self.groups: set[Hashable] = set()
        """Groups that have blocks, for the guard of an eviction."""
        self.lane_of: dict[str, str] = {}
        """Id of a waiting request -> its lane, for the guard of an order, as all below."""
        self.num_waiting: Counter[str] = Counter()
        """Lane -> its waiting requests."""
        self.keys: dict[str, OrderKey] = {}
        """Id of a waiting request -> its key when it was asked last."""
        self.lane_keys: dict[str, OrderKey] = {}
        """Lane with waiting requests -> its key when it was asked last."""
        contract = SEAMS[seam]
        required: frozenset[str] = getattr(contract, "__abstractmethods__", frozenset())
        for key, default in vars(contract).items():
            if key.startswith("_"):
                continue
            if not callable(default):
                setattr(self, key, getattr(policy, key, default))
                continue
            if not hasattr(policy, key) and key in required:
                raise _lacks(seam, name, key)
            is_own = hasattr(policy, key) and getattr_static(type(policy), key, None) is not default
            if is_own and key == "outranks" and not getattr(policy, "has_ranks", False):
                remedy = "Say has_ranks = True in its class, or leave outranks out."
                raise OwnPolicyError(seam, name, "has a method outranks, which is never asked.", remedy=remedy)
            call = getattr(policy, key) if hasattr(policy, key) else default.__get__(self)
            # By these calls the guard knows the groups and the waiting requests, also if the policy does not look at them.
            is_noted = key in ("resized", "queued", "unqueued")
            setattr(self, key, self._guarded(key, call, default) if is_own or is_noted else call)
        known = [key for key in vars(contract) if not key.startswith("_")]
        for key in sorted({*dir(type(policy))} - {*known}):
            for close in get_close_matches(key, known, n=1, cutoff=0.8):
                if getattr_static(type(policy), close, None) in (None, vars(contract)[close]):
                    warn(f"The {seam} {name!r} has {key}, which is never asked. Did you mean {close}?", stacklevel=2)

    def __getattr__(self, key: str) -> object:
        """Other attributes are those of the policy itself."""
        return getattr(object.__getattribute__(self, "_policy"), key)

    def _guarded(self, key: str, call: Callable[..., object], contract: Callable[..., object]) -> Callable[..., object]:
        parameters = list(signature(contract).parameters)[1:]
        try:
            signature(call).bind(*parameters)
        except TypeError:
            cause = f"has a method {key} that does not take the arguments of the call."
            raise OwnPolicyError(
                self._seam, self._name, cause, remedy=f"Define it as {key}({', '.join(['self', *parameters])})."
            ) from None
        except ValueError:  # a function in C that does not say what it takes
            pass
        check = _CHECKS.get((self._seam, key))

        @wraps(call)
        def guarded_call(*arguments: object) -> object:
            try:
                answer = call(*arguments)
                wanted = check(self, answer, *arguments) if check is not None else ""
            except (ConfigError, PolicyError):
                raise
            except Exception as error:
                text = f"The {self._seam} {self._name!r} failed in {key}: {_told(error)}"
                raise PolicyError(text, remedy="It is a policy of your own.") from error
            if wanted:
                text = f"The {self._seam} {self._name!r} answered {_shown(answer)} in {key}, and must answer {wanted}."
                raise PolicyError(text, remedy="It is a policy of your own; docs/how-to/policy.md says what is asked.")
            return answer

        return guarded_call


def _shown(answer: object) -> str:
    """An answer for the log: never a prompt, which a request would show."""
    if isinstance(answer, int | float | str | GateDecision | StepLimits | Prediction | None):
        return repr(answer)[:200]
    return f"something of type {type(answer).__name__}"


def _of_type(kind: type, words: str) -> Callable[..., str]:
    def check(guard: _Guard, answer: object, *arguments: object) -> str:
        del guard, arguments
        return "" if isinstance(answer, kind) else words

    return check


def _check_max_running(guard: _Guard, answer: object, capacity: Capacity) -> str:
    del guard
    most = min(capacity.max_rows, capacity.max_step_tokens)
    return "" if type(answer) is int and 1 <= answer <= most else f"a number of requests from 1 to {most}"


def _check_decision(guard: _Guard, answer: object, view: GateView) -> str:
    if not isinstance(answer, GateDecision):
        return "a GateDecision"
    if answer.max_admissions < 1:
        is_late = answer.wakeup_ns is not None and answer.wakeup_ns <= view.now_ns
        return f"a wakeup_ns after now ({view.now_ns}), or None" if is_late else ""
    buckets = [bucket.bucket for bucket in view.buckets]
    if answer.bucket not in buckets:
        return f"a bucket of the view, {buckets}"
    if answer.is_batch and getattr(guard, "is_continuous", False):
        return "no batch, since it says that it is continuous"
    if answer.is_batch and view.num_running + view.num_joining:
        return "no batch while requests run or join"
    if answer.is_batch and answer.max_admissions > view.max_rows:
        return f"a batch of at most {view.max_rows} requests"
    return ""


def _note_queued(guard: _Guard, answer: object, request: Request) -> str:
    del answer
    lane: str = guard.lane(request)
    guard.lane_of[request.request_id] = lane
    guard.num_waiting[lane] += 1
    guard.keys[request.request_id] = ()
    guard.lane_keys.setdefault(lane, ())
    return ""


def _note_unqueued(guard: _Guard, answer: object, request: Request) -> str:
    del answer, guard.keys[request.request_id]
    lane = guard.lane_of.pop(request.request_id)
    guard.num_waiting[lane] -= 1
    if not guard.num_waiting[lane]:
        del guard.num_waiting[lane], guard.lane_keys[lane]
    return ""


def _check_key(guard: _Guard, answer: object, request: Request, now_ns: int) -> str:
    del now_ns
    return _check_growth(guard.keys, request.request_id, answer, "the request waits")


def _check_lane_key(guard: _Guard, answer: object, lane: str) -> str:
    return _check_growth(guard.lane_keys, lane, answer, "a request of the lane waits")


def _check_growth(known: dict[str, OrderKey], name: str, answer: object, meanwhile: str) -> str:
    # Keys are compared; one that does not equal itself (NaN) would be asked for again without end.
    if not isinstance(answer, tuple) or not all(isinstance(part, int | float) and part == part for part in answer):
        return "a tuple of numbers"
    if name in known:
        if answer < known[name]:
            return f"a tuple that is not less than its answer before: it may only grow while {meanwhile}"
        known[name] = answer
    return ""


def _check_limits(guard: _Guard, answer: object, view: BudgetView) -> str:
    del guard
    if not isinstance(answer, StepLimits):
        return "StepLimits"
    least = 0 if view.num_decodes else 1
    if type(answer.max_tokens) is not int or not least <= answer.max_tokens <= view.max_step_tokens:
        return f"max_tokens from {least} to {view.max_step_tokens}"
    if answer.max_chunk_tokens < 1 or answer.max_long_prefills < 1:
        return "max_chunk_tokens and max_long_prefills of at least 1"
    return ""


def _check_victim(guard: _Guard, answer: object, view: VictimView) -> str:
    del guard
    if not isinstance(answer, Eviction):
        return "an Eviction"
    return "" if any(answer.request is one for one in view.candidates) else "one of the candidates of the view"


def _check_prediction(guard: _Guard, answer: object, request: object) -> str:
    del guard, request
    if answer is None or (isinstance(answer, Prediction) and type(answer.num_tokens) is int and answer.num_tokens >= 1):
        return ""
    return "a Prediction of at least one token, or None"


def _check_group(guard: _Guard, answer: object, request: object) -> str:
    del guard, request
    try:
        hash(answer)
    except TypeError:
        return "something that can be a key of a dict"
    return ""


def _note_size(guard: _Guard, answer: object, group: Hashable, num_blocks: int) -> str:
    del answer
    (guard.groups.add if num_blocks else guard.groups.discard)(group)  # its own module
    return ""


def _check_evicted(guard: _Guard, answer: object) -> str:
    return "" if _check_group(guard, answer, None) == "" and answer in guard.groups else "a group that has blocks"


_CHECKS: Mapping[tuple[str, str], Callable[..., str]] = {
    ("gate", "max_running"): _check_max_running,
    ("gate", "bucket_of"): _of_type(int, "a number"),
    ("gate", "decide"): _check_decision,
    ("order", "key"): _check_key,
    ("order", "lane"): _of_type(str, "a text"),
    ("order", "lane_key"): _check_lane_key,
    ("order", "queued"): _note_queued,
    ("order", "unqueued"): _note_unqueued,
    ("budget", "limits"): _check_limits,
    ("reserve", "required_blocks"): _of_type(int, "a whole number of blocks"),
    ("victim", "choose"): _check_victim,
    ("predictor", "predict"): _check_prediction,
    ("eviction", "group_of"): _check_group,
    ("eviction", "resized"): _note_size,
    ("eviction", "choose"): _check_evicted,
}
"""(seam, method) -> a check of its answer: says what it must be, or nothing if it is right."""
