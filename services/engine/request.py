"""One request, from arrival to its last token. Owned by the scheduler once submitted: no other thread touches it."""

import enum
import time
from dataclasses import dataclass, field

from services.protocol.generate import GenerateRequest, SamplingParams, Standing, unpack_ids


class State(enum.Enum):
    WAITING = "waiting"
    """In the queue, not looked up yet or preempted."""
    WAITING_FOR_KV = "waiting_for_kv"
    """The kvstore was asked, or blocks are on their way to the device."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Request:
    request_id: str
    gateway_id: str
    prompt: list[int]
    output: list[int]
    """Generated tokens, those that came with a resumed request included."""
    resumed: int
    """How many of `output` came with the request: they are not sent again."""
    sampling: SamplingParams
    cache_salt: str = ""
    session_id: str = ""
    hints: tuple[int, ...] = ()
    """See GenerateRequest.hints."""
    standing: Standing = "idle"
    """See GenerateRequest.standing."""
    trace: str = ""
    """W3C traceparent of the engine's request span, or empty."""
    arrived: int = field(default_factory=time.time_ns)
    state: State = State.WAITING

    @classmethod
    def from_wire(cls, wire: GenerateRequest, trace: str = "") -> "Request":
        output = unpack_ids(wire.generated)
        return cls(
            request_id=wire.request_id,
            gateway_id=wire.gateway_id,
            prompt=unpack_ids(wire.prompt),
            output=output,
            resumed=len(output),
            sampling=wire.sampling,
            cache_salt=wire.cache_salt,
            session_id=wire.session_id,
            hints=wire.hints,
            standing=wire.standing,
            trace=trace,
        )
