"""Makes the workload that a command's options describe: read from a file or synthetic, then transformed in a fixed order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random

from penstock.lab import arrivals, transforms
from penstock.lab.synthetic import NAMED, Lengths, synthetic
from penstock.lab.traces import CountTokens, read_workload
from penstock.lab.workload import Workload
from penstock.types.errors import ConfigError, counted

DEFAULT_REQUESTS = 100
ARRIVALS = ("closed", "constant", "poisson", "gamma", "ramp", "bursts", "stages")
MAX_REQUESTS = 2_000_000
MAX_TENANTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadChoice:
    """A command's options for its workload. Fields that are None or empty change nothing; contradictory fields are errors."""

    workload: str = "synthetic"
    """A name in `synthetic.NAMED`, or a file that `traces` can read."""
    requests: int | None = None
    """Number of requests. None takes all of a file, else as many as `stages` last for, or 100."""
    arrivals: str = ""
    """One of `ARRIVALS`. If empty, other fields imply it, or the file's own arrivals are kept."""
    rate: float | None = None
    rate_to: float | None = None
    cv: float | None = None
    burst_s: tuple[float, float] | None = None
    stages: tuple[tuple[float, float], ...] = ()
    speed: float = 1.0
    divide_lengths: int = 1
    max_input_tokens: int | None = None
    max_output_tokens: int | None = None
    input_tokens: str = ""
    """For `Lengths.parse`: length of a synthetic prompt. In a conversation, of each new message."""
    output_tokens: str = ""
    prefix_tokens: int = 0
    """Tokens before each synthetic prompt, shared within its group."""
    prefix_groups: int = 1
    tenants: str = ""
    """Names with weights, `a=7,b=1`, or a number of equal tenants, `4`."""
    cancel_share: float = 0.0
    sessions: int = 1
    """Most turns of a conversation. Without conversations in the file, successive requests are chained."""
    think_time_s: float = 0.0
    seed: int = 0

    @property
    def mean_rate(self) -> float | None:
        """Arrivals per second of `rate`, averaged over a ramp and with `speed`. None without `rate`."""
        if self.rate is None:
            return None
        last = self.rate if self.rate_to is None else self.rate_to
        return (self.rate + last) / 2 * self.speed


def make_workload(choice: WorkloadChoice, count_tokens: CountTokens | None = None, source: Workload | None = None) -> Workload:
    """Make the workload. Its name lists the changes. Raises PenstockError.

    `count_tokens` counts the texts of a file; None estimates. `source`: requests that were read already. The order is: read,
    chain turns, divide lengths, add shared prefixes, cap lengths, think times, arrivals, speed, tenants, cancellations.
    """
    kind = arrivals_of(choice)
    if choice.requests is not None and not 1 <= choice.requests <= MAX_REQUESTS:
        raise ConfigError(f"The number of requests is {choice.requests}.", remedy=f"Set it from 1 to {MAX_REQUESTS}.")
    workload = source or (_synthetic(choice) if choice.workload in NAMED else _read(choice, count_tokens))
    workload = transforms.divide_lengths(workload, choice.divide_lengths)
    if choice.prefix_tokens:
        workload = transforms.share_prefix(workload, choice.prefix_tokens, choice.prefix_groups, choice.seed)
    workload = transforms.cap_lengths(
        workload, max_prompt_tokens=choice.max_input_tokens, max_output_tokens=choice.max_output_tokens
    )
    if choice.think_time_s:
        if choice.sessions == 1:
            raise ConfigError("A think time needs conversations.", remedy="Set --sessions above 1.")
        workload = transforms.think(workload, choice.think_time_s, choice.seed)
    if kind:
        workload = arrivals.arrive(workload, *_arrivals(workload, kind, choice))
    if choice.speed != 1 and not any(job.arrival_ns for job in workload.jobs):
        raise ConfigError("All requests come at once: there is no time to divide.", remedy="Leave out --speed, or set --rate.")
    workload = transforms.speed(workload, choice.speed)
    if choice.tenants:
        workload = transforms.assign_tenants(workload, parse_tenants(choice.tenants), choice.seed)
    if choice.cancel_share:
        workload = transforms.cancel(workload, choice.cancel_share, choice.seed)
    return workload


def parse_tenants(text: str) -> Mapping[str, float]:
    """Parse tenants: `a=7,b=1`, or `4` for four equal ones. Return name -> weight. Raises ConfigError."""
    if re.fullmatch(r"\d{1,9}", text):
        if not 1 <= int(text) <= MAX_TENANTS:
            raise ConfigError(f"The number of tenants is {text}.", remedy=f"Set it from 1 to {MAX_TENANTS}.")
        return {f"tenant-{nth}": 1.0 for nth in range(1, int(text) + 1)}
    weights: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = part.strip().rpartition("=")
        if not name or name in weights or not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", weight):
            raise ConfigError(
                f"{part[:40]!r} is not a tenant with a weight.", remedy="Write a=7,b=1; or 4 for four that are alike."
            )
        weights[name] = float(weight)
    return weights


def parse_stages(text: str) -> tuple[tuple[float, float], ...]:
    """Parse stages: `2x60,10x30` is 2 requests per second for 60 seconds, then 10 for 30. Raises ConfigError."""
    stages = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)x(\d{1,9}(?:\.\d{1,9})?)", part.strip())
        if found is None:
            raise ConfigError(
                f"{part[:40]!r} is not a stage.",
                remedy="Write 2x60,10x30: 2 requests per second for 60 seconds, then 10 for 30.",
            )
        stages.append((float(found[1]), float(found[2])))
    return tuple(stages)


def _synthetic(choice: WorkloadChoice) -> Workload:
    if choice.prefix_tokens < 0 or choice.prefix_groups < 1:
        raise ConfigError(
            "A shared prefix has at least 1 token, and 1 group.", remedy="Set --prefix-tokens and --prefix-groups."
        )
    if choice.prefix_groups != 1 and not choice.prefix_tokens:
        raise ConfigError("--prefix-groups needs a shared prefix.", remedy="Set --prefix-tokens.")
    prompt, output = NAMED[choice.workload]
    lengths = Lengths.parse(choice.input_tokens or prompt), Lengths.parse(choice.output_tokens or output)
    num_roots = round(sum(rate * seconds for rate, seconds in choice.stages))
    count = choice.requests or choice.sessions * num_roots or DEFAULT_REQUESTS
    if count > MAX_REQUESTS:
        raise ConfigError(f"The stages make {count} requests.", remedy=f"At most {MAX_REQUESTS} can be generated.")
    made_up = synthetic(choice.workload, count, prompt=lengths[0], output=lengths[1], seed=choice.seed)
    return transforms.converse(made_up, choice.sessions)


def check_exists(workload: str) -> None:
    """Raise ConfigError unless this is the name of a workload or a file. Does not read the file."""
    if workload not in NAMED and not Path(workload).expanduser().is_file():
        raise ConfigError(
            f"{workload} is neither a file nor the name of a workload.",
            remedy=f"Names are {', '.join(NAMED)}; a file may be a trace, a recording or prompts.",
        )


def _read(choice: WorkloadChoice, count_tokens: CountTokens | None) -> Workload:
    check_exists(choice.workload)
    path = Path(choice.workload).expanduser()
    for name, flag in (
        ("input_tokens", "--input-tokens"),
        ("output_tokens", "--output-tokens"),
        ("prefix_tokens", "--prefix-tokens"),
    ):
        if getattr(choice, name):
            raise ConfigError(
                f"{flag} is for a workload that is made up, and {path.name} has its own.", remedy=f"Leave out {flag}."
            )
    if choice.prefix_groups != 1:
        raise ConfigError("--prefix-groups is for a workload that is made up.", remedy="Leave it out.")
    workload = read_workload(path, count_tokens=count_tokens, max_requests=choice.requests, max_turns=choice.sessions)
    if choice.requests is not None and len(workload.jobs) < choice.requests:
        have = counted(len(workload.jobs), "request")
        raise ConfigError(f"{path.name} has {have}, fewer than {choice.requests}.", remedy="Ask for fewer.")
    return workload


_OPTIONS = {
    "ramp": ("rate_to", "--rate-to"),
    "bursts": ("burst_s", "--burst-s"),
    "gamma": ("cv", "--cv"),
    "stages": ("stages", "--stages"),
}
"""Kind of arrivals -> the field that is only for this kind, and its option."""


def arrivals_of(choice: WorkloadChoice) -> str:
    """Return the kind of arrivals that the options set or imply; "" keeps the file's own. Raises ConfigError."""
    given = [kind for kind, (field, _) in _OPTIONS.items() if getattr(choice, field) not in (None, ())]
    kind = choice.arrivals or next(iter(given), "poisson" if choice.rate is not None else "")
    if kind and kind not in ARRIVALS:
        raise ConfigError(f"Unknown arrivals {kind!r}.", remedy=f"Valid: {', '.join(ARRIVALS)}.")
    for other in given:
        if other != kind:
            option = _OPTIONS[other][1]
            raise ConfigError(
                f"{option} is for arrivals {other!r}, not for {kind!r}.",
                remedy=f"Leave out {option}, or set --arrivals {other}.",
            )
    if kind in ("ramp", "stages") and kind not in given:
        raise ConfigError(f"Arrivals {kind!r} need {_OPTIONS[kind][1]}.", remedy=f"Set {_OPTIONS[kind][1]}.")
    if kind in ("closed", "stages") and choice.rate is not None:
        raise ConfigError(f"Arrivals {kind!r} have no rate of their own.", remedy="Leave out --rate.")
    return kind


def check_closed_loop(choice: WorkloadChoice) -> None:
    """Raise ConfigError for options that set when requests arrive, which a closed loop ignores."""
    if arrivals_of(choice) not in ("", "closed"):
        raise ConfigError(
            "--concurrency is a closed loop, whose users set when requests arrive.",
            remedy="Leave it out, or --rate, --arrivals, --stages and the like.",
        )


def _arrivals(workload: Workload, kind: str, choice: WorkloadChoice) -> tuple[list[int], str]:
    """Return the arrivals of this kind, as nanoseconds, and words for the workload's name."""
    count = arrivals.num_arrivals(workload)
    rng = Random(f"arrivals {choice.seed}")  # noqa: S311  # repeatable on purpose
    if kind == "closed":
        return [0] * count, "all at once"
    if kind == "stages":
        words = ", ".join(f"{rate:g}/s for {seconds:g} s" for rate, seconds in choice.stages)
        return arrivals.stages(rng, count, choice.stages), f"Poisson at {words}"
    rate = choice.rate if choice.rate is not None else arrivals.mean_rate(workload)
    if rate is None:
        raise ConfigError(f"{workload.name} has no rate.", remedy="Set --rate, in requests per second.")
    if kind == "constant":
        return arrivals.constant(count, rate), f"constant {rate:.6g}/s"
    if kind == "poisson":
        return arrivals.poisson(rng, count, rate), f"Poisson {rate:.6g}/s"
    if kind == "gamma":
        cv = 1.0 if choice.cv is None else choice.cv
        return arrivals.gamma(rng, count, rate, cv), f"gamma {rate:.6g}/s with CV {cv:g}"
    if kind == "ramp":
        assert choice.rate_to is not None, "checked above"
        return arrivals.ramp(rng, count, rate, choice.rate_to), f"ramp {rate:.6g} to {choice.rate_to:g}/s"
    on_s, off_s = choice.burst_s or (5.0, 15.0)
    return arrivals.bursts(rng, count, rate, on_s, off_s), f"bursts of {on_s:g} s every {on_s + off_s:g} s, {rate:.6g}/s"
