"""A submitted request as the scheduler works on it: its tokens, its pages, and its accounts."""

from dataclasses import dataclass, field

from services.engine.cache.checkpoints import Checkpoint
from services.engine.cache.owners import Owner
from services.engine.cache.prefix_cache import BlockChain
from services.engine.mailbox import Timeline
from services.engine.request import Request, State
from services.protocol.generate import FinishReason, Missed, ThoughtLimit, Usage
from services.protocol.hashing import root
from services.protocol.kv import Key

_NANO = 1e-9


@dataclass(slots=True, eq=False)
class Sequence:
    """Owned by the scheduler. `tokens` is always prompt + output; `request.output` grows with it."""

    request: Request
    order: int
    """Place in the line of arrivals: smaller is older. Kept over preemptions."""
    tokens: list[int]
    chain: BlockChain
    owner: Owner
    limit: int
    """Tokens at most, by the context length and max_tokens."""
    thoughts: ThoughtLimit | None = None
    """None when the thoughts are over, or may be as long as they will."""
    pages: list[int] = field(default_factory=list)
    computed: int = 0
    """KV of positions below this is in `pages`."""
    committed: int = 0
    """Blocks below this are named, and `pages` holds the named page."""
    state: int = -1
    """Slot of the recurrent state, which stands at `computed`; -1 while it does not run, or the model has none."""
    stops: tuple[int, ...] = ()
    """Positions, ascending, at which a chunk of the prefill ends and a checkpoint is taken."""
    partings: set[int] = field(default_factory=set)
    """Positions at which others that prefill beside it part from it."""
    behind: Checkpoint | None = None
    """The last checkpoint on its way."""
    rolling: list[Checkpoint] = field(default_factory=list)
    """The last states that its decode has left behind itself."""
    kept: set[Key] = field(default_factory=set)
    """Checkpoints that it left behind for requests to come."""
    prefilled: bool = False
    """All of `tokens` went through the model since the last admission: what comes now is decoding."""
    turn: int = 0
    """When it last ran, counted in rows of all steps."""
    patience: float = 0.0
    """time.monotonic() until which it waits for pages to be copied to the kvstore; 0: it does not wait."""
    due: float = 0.0
    """time.monotonic() before which the runner has nothing for it."""
    covered: int = 0
    """Prompt tokens that were computed or found at least once."""
    cached_device: int = 0
    cached_host: int = 0
    cached_disk: int = 0
    missed: Missed | None = None
    """Why it had to compute, as seen before its first step."""
    explained: bool = False
    kept_here: Checkpoint | None = None
    """Pinned while the kvstore is asked for a deeper one."""
    short: bool = False
    """Its last restore found no room."""
    met: bool = False
    """It was seen beside the prefills that began before it."""
    prefetch: bool = False
    """A restore for it is under way while it waits in the queue."""
    prefetched: range | None = None
    """Positions that such a restore has brought; empty where there was nothing to bring."""
    computed_tokens: int = 0
    preemptions: int = 0
    restore_started: int = 0
    restore_ended: int = 0
    scheduled: int = 0
    first_token: int = 0

    @classmethod
    def of(cls, request: Request, order: int, fingerprint: str, max_model_len: int, owner: Owner) -> "Sequence":
        tokens = request.prompt + request.output
        thoughts = request.sampling.thoughts
        return cls(
            request=request,
            order=order,
            tokens=tokens,
            chain=BlockChain(root(fingerprint, request.cache_salt), tokens),
            owner=owner,
            limit=min(max_model_len, len(request.prompt) + request.sampling.max_tokens),
            thoughts=thoughts if thoughts is not None and thoughts.close not in request.output else None,
        )

    @property
    def remaining(self) -> int:
        """Tokens that the model has not seen yet. 0 when all KV is there and only logits are wanted."""
        return len(self.tokens) - self.computed

    @property
    def rerun(self) -> int:
        """Tokens to run again where nothing remains: the last one, unless a state keeps its hidden vector."""
        return 1 if self.state < 0 else 0

    def finished(self) -> FinishReason | None:
        """Whether the tokens so far end the answer."""
        output = self.request.output
        if output and output[-1] in self.request.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) >= self.limit else None

    def extend(self, tokens: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append generated tokens up to the one that ends the answer, or the one at which its thoughts are to end, and
        then what closes those. Returns (those appended, why it ended)."""
        for count, token in enumerate(tokens, 1):
            self._append(token)
            if (finish := self.finished()) is not None:
                return tokens[:count], finish
            if closing := self._closing(token):
                for other in closing:
                    self._append(other)
                return tokens[:count] + closing, self.finished()
        return tokens, None

    def _append(self, token: int) -> None:
        self.request.output.append(token)
        self.tokens.append(token)

    def _closing(self, token: int) -> tuple[int, ...]:
        """What is to follow `token`, the newest one, to close the thoughts; nothing before their limit."""
        thoughts = self.thoughts
        if thoughts is None or (token != thoughts.close and len(self.request.output) < thoughts.tokens):
            return ()
        self.thoughts = None
        return () if token == thoughts.close else thoughts.closing[: self.limit - len(self.tokens)]

    def found(self, device: int, host: int, disk: int = 0) -> None:
        """Account for a prefix of `device` + `host` tokens that needs no computing, bar what is to `rerun`; `disk` of
        those of the host came from its disk. A prompt token counts once, when first covered."""
        reach = min(device + host, len(self.tokens) - self.rerun, len(self.request.prompt))
        on_device = max(0, min(device, reach) - self.covered)
        if self.prefetched:
            brought = range(max(self.covered, self.prefetched.start), min(device, reach, self.prefetched.stop))
            on_device -= len(brought)
        self.cached_device += on_device
        on_host = max(0, reach - self.covered - on_device)
        self.cached_host += on_host
        self.cached_disk += min(disk, on_host)
        self.covered = max(self.covered, reach)

    def ran(self, start: int, count: int) -> None:
        """Account for positions [start, start + count) that went through the model."""
        # A decode that asks again for the logits of its last token (nothing was due) computes nothing that counts.
        first = max(start, self.computed) if self.prefilled else start
        reach = min(start + count, len(self.request.prompt))
        self.computed = max(self.computed, start + count)
        self.computed_tokens += max(0, reach - first)
        self.covered = max(self.covered, reach)

    def preempted(self) -> None:
        """It has given up its pages, which the caller has released: all that is left is what it has said."""
        self.request.state = State.WAITING
        self.pages = []
        self.computed = self.committed = 0
        self.prefilled = False
        self.due = self.patience = 0.0
        self.preemptions += 1

    def restore_begins(self, now: int) -> None:
        """Of the restores that a request waits for before its first step, first to last is told; later ones (after a
        preemption) are part of its prefill or decode."""
        if not self.scheduled:
            self.restore_started = self.restore_started or now

    def restore_ends(self, now: int) -> None:
        if not self.scheduled:
            self.restore_ended = now

    def usage(self, now: int) -> Usage:
        """`now` in time.time_ns(), as all of the sequence's times."""
        scheduled = self.scheduled or now
        first_token = self.first_token or now
        return Usage(
            prompt_tokens=len(self.request.prompt),
            output_tokens=len(self.request.output),
            cached_device=self.cached_device,
            cached_host=self.cached_host,
            cached_disk=self.cached_disk,
            computed_tokens=self.computed_tokens,
            preemptions=self.preemptions,
            queue_seconds=max(0, scheduled - self.request.arrived) * _NANO,
            restore_seconds=max(0, self.restore_ended - self.restore_started) * _NANO,
            prefill_seconds=max(0, first_token - scheduled) * _NANO,
            decode_seconds=max(0, now - first_token) * _NANO,
            missed=self.missed,
        )

    def timeline(self, now: int, finish: FinishReason, usage: Usage) -> Timeline:
        return Timeline(
            request_id=self.request.request_id,
            arrived=self.request.arrived,
            restore_started=self.restore_started,
            restore_ended=self.restore_ended,
            scheduled=self.scheduled,
            first_token=self.first_token,
            finished=now,
            finish=finish,
            usage=usage,
        )
