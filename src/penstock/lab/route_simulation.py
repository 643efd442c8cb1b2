"""Simulates a route or a pipeline: several models on one machine, and upstreams, with recorded scores of their answers.

The models are `VirtualServer`s, which take turns. Decisions are made as in the server: which model gets a question, when the
next one is asked, and how long first tokens or whole answers are held back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from penstock.clock import Clock, VirtualClock
from penstock.lab.agenda import Agenda
from penstock.lab.distant import Distant, DistantModel
from penstock.lab.links import fresh_copy
from penstock.lab.machine import Account, Seat, SharedMachine, Turns
from penstock.lab.pacing import Pace
from penstock.lab.records import End, Record
from penstock.lab.simulated_executor import TOKEN_ID
from penstock.lab.simulation import note_due, play
from penstock.lab.traffic import Call, Prompts, Traffic, status_of
from penstock.lab.virtual_server import ServerSettings, VirtualServer
from penstock.lab.workload import Workload
from penstock.routes.learned import LearnedRoute
from penstock.routes.scores import Answer, Question, shared_blocks
from penstock.types.errors import Rejected, RejectReason
from penstock.types.events import TokenEvent
from penstock.types.request import FinishReason
from penstock.types.stats import RequestStats

_BUSY_STATUSES = (429, 503)


JUDGE_TOKENS, VERDICT_TOKENS = 24, 2
"""Tokens of a judge's prompt besides the conversation and the answers, and of its verdict."""
WHOLE = 1 << 62
"""A window that no answer exceeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A rule that holds answers back until all have ended. Then the recorded confidence decides which one the client gets."""

    least: float
    """Minimum confidence to keep the weak model's answer."""
    samples: int = 1
    """Parallel answers of the weak model."""
    both: bool = False
    """Whether the strong model answers in parallel."""
    judge: str | None = None
    """The model that reads the answers. None: the answers are compared with each other."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    name: str
    models: tuple[str, ...]
    """Asked one after another until one does not refuse. With `learned`, the weak and the strong model."""
    learned: LearnedRoute | None = None
    threshold: float = 0.0
    """Minimum gain to let the strong model answer."""
    judged: Judged | None = None
    search_ns: int | None = None
    """In a pipeline: time of the search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteOutcome:
    strategy: Strategy
    records: Sequence[Record]
    """One for each question, in their order, as a client would have written it."""
    answerers: Mapping[int, str]
    """Index of a question -> the model that answered it."""
    quality: float
    """Mean result of the answers."""
    num_begun: int
    """Answers of the weak model that were held back for a decision: whole answers, or their first tokens."""
    used_ns: Mapping[str, int]
    """Model, or "" for the embedding model -> time for which it used the machine."""
    duration_ns: int
    num_steps: int
    num_outside: int
    """Steps outside of the range that the cost models were fitted to."""
    outside: Mapping[str, int]
    """Exceeded limit, such as `rows > 64` -> number of steps that exceed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSimulation:
    kinds: Mapping[str, str]
    """Name of a model -> `weak` or `strong`: the recorded answers that it gives."""
    here: Mapping[str, ServerSettings]
    elsewhere: Mapping[str, Distant] = field(default_factory=dict)
    make_turns: Callable[[], Turns]
    make_account: Callable[[str], Account]
    """Makes a model's account at the machine. The embedding model's name is empty."""
    embed_ns: int = 0
    """Time of the machine to embed one question. A step embeds all waiting questions."""
    max_returns: int = 0
    seed: int = 0

    def run(self, strategy: Strategy, questions: Sequence[Question], workload: Workload, *, pace: Pace) -> RouteOutcome:
        """Ask all questions. `workload`: a job for each, with its arrival, deadline and cancellation."""
        clock = VirtualClock()
        settings = max(self.here.values(), key=lambda one: one.capacity.max_model_len)
        traffic = Traffic(workload, clock, settings, pace=pace, max_returns=self.max_returns)
        router = _Router(self, strategy, questions, workload, clock, traffic)
        traffic.begin(router)
        play(clock, traffic, router.servers, router.due)
        records = sorted(traffic.records, key=lambda record: record.index)
        answerers = {record.index: router.answerers[record.index] for record in records if record.end is End.OK}
        results = [_answer(questions[index], self.kinds[name]).result for index, name in answerers.items()]
        return RouteOutcome(
            strategy=strategy,
            records=records,
            answerers=answerers,
            quality=sum(results) / max(1, len(results)),
            num_begun=router.num_begun,
            used_ns={name: seat.used_ns() for name, seat in router.seats.items()},
            duration_ns=clock.now_ns(),
            num_steps=sum(server.num_steps for server in router.servers),
            num_outside=sum(server.times.num_outside for server in router.servers),
            outside=sum((Counter(server.times.outside) for server in router.servers), Counter[str]()),
        )


def _gives_way(rejected: Rejected) -> bool:
    """Return whether the next model is asked after this refusal: the model is busy, or the prompt too long for it."""
    return status_of(rejected.reason) in _BUSY_STATUSES or rejected.reason is RejectReason.CONTEXT_LENGTH


def _answer(question: Question, kind: str) -> Answer:
    return question.weak if kind == "weak" else question.strong


@dataclass(slots=True)
class _Attempt:
    """One model's answer to a call."""

    call: Call
    model: str
    rest: tuple[str, ...]
    """Models to ask in turn if this one refuses, or its answer is not kept."""
    window: int = 0
    """Tokens to hold back before deciding. 0 passes tokens on at once."""
    held: list[TokenEvent] = field(default_factory=list)
    together: _Together | None = None
    stats: RequestStats | None = None
    """Set when an answer that is judged with others has ended."""


@dataclass(slots=True)
class _Together:
    """Answers to one call that are judged together, the weak model's first."""

    attempts: list[_Attempt] = field(default_factory=list)
    num_open: int = 0
    """Requests in flight, including a judge's."""
    is_judged: bool = False


class _Router:
    def __init__(
        self,
        simulation: RouteSimulation,
        strategy: Strategy,
        questions: Sequence[Question],
        workload: Workload,
        clock: Clock,
        traffic: Traffic,
    ) -> None:
        self.servers: list[VirtualServer] = []
        self.due: list[tuple[int, int]] = []
        self.answerers: dict[int, str] = {}
        self.num_begun = 0
        self._simulation, self._strategy, self._questions = simulation, strategy, questions
        self._clock, self._traffic = clock, traffic
        machine, names = SharedMachine(simulation.make_turns(), traffic.agenda, clock), ("", *simulation.here)
        self.seats = {name: machine.seat(simulation.make_account(name)) for name in names}
        self._encoder = _Encoder(self.seats[""], simulation.embed_ns, traffic.agenda)
        self._models: dict[str, VirtualServer | DistantModel] = {}
        for number, (name, settings) in enumerate(simulation.here.items()):
            report, seed = partial(self._report, name), f"{simulation.seed} {number}"
            server = VirtualServer(settings, clock, report=report, seed=seed, seat=self.seats[name])
            server.player.on_woken = partial(note_due, self.due, server.player, number)
            self.servers.append(server)
            self._models[name] = server
        for name, distant in simulation.elsewhere.items():
            self._models[name] = DistantModel(distant, clock, traffic.agenda, report=partial(self._report, name))
        self._prompts = {kind: _prompts(questions, workload, kind) for kind in ("weak", "strong")}
        self._attempts: dict[str, _Attempt] = {}
        """Id of a request to a model -> its attempt. Abandoned requests have none, although the engine reports their end."""
        self._current: dict[str, list[str]] = {}
        """Id of a call -> ids of its requests in flight at the models."""
        self._num_attempts = 0

    # A call: the vector of its question, the model, its end.

    def submit(self, call: Call) -> None:
        if self._strategy.learned is None and self._strategy.search_ns is None:
            self._choose(call)
        elif self._simulation.embed_ns:
            self._encoder.embed(partial(self._search, call))
        else:
            self._search(call)

    def _search(self, call: Call) -> None:
        """In a pipeline, spend the time of the search. Then choose the model."""
        if self._strategy.search_ns is None:
            self._go_on(call)
        else:
            self._traffic.agenda.note(self._clock.now_ns() + self._strategy.search_ns, partial(self._go_on, call))

    def _go_on(self, call: Call) -> None:
        if self._traffic.calls.get(call.request.request_id) is not call:
            return  # the call was cancelled meanwhile
        self._or_reject(self._choose, call)

    def _or_reject(self, ask: Callable[..., None], call: Call, *about: Sequence[str]) -> None:
        try:
            ask(call, *about)
        except Rejected as rejected:
            self._traffic.reject(call, rejected)

    def _choose(self, call: Call) -> None:
        models, learned, threshold = self._strategy.models, self._strategy.learned, self._strategy.threshold
        if self._strategy.judged is not None:
            self._ask_together(call, self._strategy.judged)
            return
        if learned is None:
            self._ask(call, models)
            return
        gain, (weak, strong) = self._questions[call.record.index].gain or 0.0, models
        if learned.cascade is not None and learned.tries(gain, threshold):
            self._ask(call, (weak, *self._strong_first), learned.cascade.window)
        elif gain >= threshold:
            self._ask(call, self._strong_first)
        else:
            self._ask(call, (weak, strong))

    def _ask(self, call: Call, models: Sequence[str], window: int = 0) -> None:
        """Ask the first of these models that does not refuse. `window` is for the first one."""
        for number, name in enumerate(models, 1):
            try:
                self._begin(_Attempt(call, name, (*models[number:],), window))
            except Rejected as rejected:
                if number == len(models) or not _gives_way(rejected):
                    raise
                window = 0
            else:
                return

    def _ask_together(self, call: Call, judged: Judged) -> None:
        """Ask for all answers to be judged. Models that refuse do not count. Raises `Rejected` if all refuse."""
        weak, strong = self._strategy.models
        together, refusal = _Together(), None
        for name in [weak] * judged.samples + [strong] * judged.both:
            attempt = _Attempt(call, name, (strong if name == weak else weak,), WHOLE, together=together)
            try:
                self._begin(attempt)
            except Rejected as rejected:
                refusal = rejected
            else:
                together.attempts.append(attempt)
        together.num_open = len(together.attempts)
        if refusal is None or together.attempts:
            return
        if judged.both or not _gives_way(refusal):
            raise refusal
        self._ask(call, self._strong_first)

    @property
    def _strong_first(self) -> tuple[str, ...]:
        """The strong model, and the weak one behind it if the strong one is an upstream, which may refuse."""
        weak, strong = self._strategy.models
        return (strong, weak) if strong in self._simulation.elsewhere else (strong,)

    def _ask_judge(self, together: _Together, judge: str) -> None:
        """Begin the judge's request. If the judge is busy, end without a verdict."""
        call = together.attempts[0].call
        kinds = {self._simulation.kinds[one.model] for one in together.attempts}
        num_read = JUDGE_TOKENS + sum(_answer(self._questions[call.record.index], kind).num_tokens for kind in kinds)
        together.is_judged = True
        try:
            self._begin(_Attempt(call, judge, (), WHOLE, together=together), num_read=num_read)
        except Rejected as rejected:
            if _gives_way(rejected):
                self._end_together(together, is_sure=len(together.attempts) > 1)  # of several answers, the first is kept
            else:
                self._traffic.reject(call, rejected)
        else:
            together.num_open = 1

    def _begin(self, attempt: _Attempt, *, num_read: int = 0) -> None:
        """`num_read`: tokens that a judge reads after the prompt. Raises `Rejected`."""
        call, index = attempt.call, attempt.call.record.index
        deadline_ns = call.request.deadline_ns
        if deadline_ns is not None and self._clock.now_ns() >= deadline_ns:
            raise Rejected(RejectReason.DEADLINE, "The deadline has passed.")
        kind = self._simulation.kinds[attempt.model]
        num_tokens = VERDICT_TOKENS if num_read else _answer(self._questions[index], kind).num_tokens
        self._num_attempts += 1
        request = fresh_copy(
            call.request,
            request_id=f"{call.request.request_id} {self._num_attempts}",
            prompt_token_ids=self._prompts[kind].make(index) + (TOKEN_ID,) * num_read,
            sampling=replace(call.request.sampling, max_tokens=num_tokens),
        )
        ask = replace(
            call.ask,
            num_token_ids=request.num_prompt_tokens,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            returns=not attempt.rest,
        )
        self._models[attempt.model].submit(request, num_tokens, ask)
        self._attempts[request.request_id] = attempt
        self._current.setdefault(call.request.request_id, []).append(request.request_id)
        self.num_begun += attempt.window > 0 and not num_read and attempt.model == self._strategy.models[0]

    def abort(self, call: Call) -> None:
        request_ids = self._current.get(call.request.request_id)
        if request_ids is None:  # the call still waits for its vector or its search
            self._traffic.end_cancelled(call)
            return
        for request_id in [*request_ids]:
            if request_id in self._attempts:  # an upstream's end ends the other answers, too
                self._models[self._attempts[request_id].model].abort(request_id)

    # Events of models.

    def _report(self, name: str, events: list[TokenEvent], _now_ns: int) -> None:
        ended = self._models[name].ended
        for event in events:
            stats = None if event.finish_reason is None else ended.pop(event.request_id)
            attempt = self._attempts.get(event.request_id)
            if attempt is None:
                continue
            if not attempt.window:
                self._pass_on(attempt, [event], stats)
                continue
            attempt.held.append(event)
            has_failed = stats is not None and stats.finish_reason not in (FinishReason.STOP, FinishReason.LENGTH)
            if attempt.together is not None:
                if stats is not None:
                    self._end_one(attempt, event.request_id, stats, has_failed=has_failed)
            elif stats is not None or sum(len(one.token_ids) for one in attempt.held) >= attempt.window:
                self._judge(attempt, event.request_id, stats, has_failed=has_failed)

    def _judge(self, attempt: _Attempt, request_id: str, stats: RequestStats | None, *, has_failed: bool) -> None:
        """Keep the weak model's answer or ask the next model, by the first tokens. `stats`: of the answer, if it has ended."""
        gain = self._questions[attempt.call.record.index].start_gain or 0.0
        attempt.window = 0
        if has_failed or gain < self._strategy.threshold:
            self._pass_on(attempt, attempt.held, stats)
            return
        if stats is None:
            self._models[attempt.model].abort(request_id)
        self._forget(attempt.call, request_id)
        self._or_reject(self._ask, attempt.call, attempt.rest)

    def _end_one(self, attempt: _Attempt, request_id: str, stats: RequestStats, *, has_failed: bool) -> None:
        """Handle the end of a judged answer, or of the judge's own."""
        together, call = attempt.together, attempt.call
        assert together is not None
        if has_failed:  # the client has left, or the deadline has passed
            others = [other for other in self._current[call.request.request_id] if other != request_id]
            self._pass_on(attempt, attempt.held, stats)
            for other in others:
                self._models[self._attempts.pop(other).model].abort(other)
            self._current.pop(call.request.request_id, None)
            return
        together.num_open -= 1
        attempt.stats = stats
        self._forget(call, request_id)
        if together.num_open:
            return
        judged = self._strategy.judged
        assert judged is not None
        is_alone = judged.both and len(together.attempts) == 1
        if judged.judge is None or together.is_judged or is_alone:
            confidence = self._questions[call.record.index].confidence or 0.0
            self._end_together(together, is_sure=is_alone or confidence >= judged.least)
        else:
            self._ask_judge(together, judged.judge)

    def _end_together(self, together: _Together, *, is_sure: bool) -> None:
        """Give the client the first answer if `is_sure`, otherwise the strong model's, which may have to be asked."""
        strong = self._strategy.models[1]
        kept = next((one for one in together.attempts if is_sure or one.model == strong), None)
        if kept is None:
            self._or_reject(self._ask, together.attempts[0].call, self._strong_first)
        else:
            self._tell_client(kept, kept.held, kept.stats)

    def _pass_on(self, attempt: _Attempt, events: Sequence[TokenEvent], stats: RequestStats | None) -> None:
        """Pass events on to the client, and forget a request that has ended."""
        if stats is not None:
            self._forget(attempt.call, events[-1].request_id)
        self._tell_client(attempt, events, stats)

    def _tell_client(self, attempt: _Attempt, events: Sequence[TokenEvent], stats: RequestStats | None) -> None:
        call = attempt.call
        # Events that were held back reach the client now.
        own = [replace(event, request_id=call.request.request_id, at_ns=self._clock.now_ns()) for event in events]
        self._traffic.tell(own)
        if stats is not None:
            self.answerers[call.record.index] = attempt.model
            self._traffic.end(own[-1], stats)

    def _forget(self, call: Call, request_id: str) -> None:
        del self._attempts[request_id]
        request_ids = self._current[call.request.request_id]
        request_ids.remove(request_id)
        if not request_ids:
            del self._current[call.request.request_id]


def _prompts(questions: Sequence[Question], workload: Workload, kind: str) -> Prompts:
    """Return the maker of the questions' prompts, with one model's token counts."""
    size = workload.prefix_block_tokens
    jobs = [
        replace(job, num_prompt_tokens=_answer(question, kind).num_prompt_tokens, prefix=prefix)
        for job, question, prefix in zip(workload.jobs, questions, shared_blocks(questions, size), strict=True)
    ]
    return Prompts(replace(workload, jobs=jobs))


class _Encoder:
    """The embedding model: each of its steps embeds all questions that wait."""

    def __init__(self, seat: Seat, text_ns: int, agenda: Agenda) -> None:
        self._seat, self._text_ns, self._agenda = seat, text_ns, agenda
        self._waiting: list[Callable[[], None]] = []
        self._is_busy = False

    def embed(self, done: Callable[[], None]) -> None:
        self._waiting.append(done)
        if not self._is_busy:
            self._begin()

    def _begin(self) -> None:
        texts, self._waiting, self._is_busy = self._waiting, [], True
        duration_ns = self._text_ns * len(texts)

        def begun(at_ns: int) -> None:
            self._agenda.note(at_ns + duration_ns, partial(self._end, texts))

        self._seat.run(0, duration_ns, begun)

    def _end(self, texts: Sequence[Callable[[], None]]) -> None:
        self._is_busy = False
        if self._waiting:
            self._begin()
        for done in texts:
            done()
