"""A step that verifies drafts of one sequence, as speculation will run it: the model over several tokens, a draw behind
each, and the states moved on by all of them."""

import time
from collections.abc import Callable
from statistics import median

import torch

from services.engine.batch import Row, SampleSpec
from services.engine.cache.pages import KvPages
from services.engine.cache.states import StatePool
from services.engine.model.qwen3_5 import HybridDecoder
from services.engine.sampler import Sampler, SampleRow
from services.engine.step_inputs import Bucket, StepInputs
from services.protocol.generate import SamplingParams
from services.protocol.hashing import BLOCK_TOKENS

_GREEDY = SamplingParams(max_tokens=1, temperature=0)
_WARM_UPS = 3


@torch.inference_mode()
def verify_seconds(
    model: HybridDecoder, pages: KvPages, states: StatePool, depth: int, tokens: int, steps: int
) -> float:
    """The median of `steps` steps of `tokens` tokens behind `depth` that the first pages hold; 0 tokens: a decode,
    which moves its state on as it reads it. On a GPU it is captured."""
    device, count = model.device, max(1, tokens)
    context = -(-(depth + count) // BLOCK_TOKENS)
    row = Row("verify", [1] * count, depth, list(range(context)), depth, SampleSpec(_GREEDY, [1], []), 0)
    records = model.records(count) if tokens else None
    inputs = StepInputs(Bucket(1, context * BLOCK_TOKENS, count), pages, states, device, records)
    slots, places = torch.zeros(2, 1, dtype=torch.int64, device=device)
    sampler = Sampler(model.config.vocab_size, count, device)
    drawn = [SampleRow(f"verify-{place}", SampleSpec(_GREEDY, [1], []), depth + place) for place in range(count)]
    accepted = torch.full((1,), count, dtype=torch.int32, device=device)
    sampler.prepare(drawn)

    def forward() -> None:
        given = inputs.tokens(sampler.tokens)
        if records is not None:
            sampler.draw(model.logits(model.verify(given, inputs.context)))
            model.fold(states.columns, states.states, slots, places, accepted, records)
        else:
            sampler.draw(model.forward(given, inputs.context))

    run = _captured(forward) if device.type == "cuda" else forward
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        inputs.fill([row])
        sampler.prepare(drawn)
        run()
        sampler.results(drawn, sampler.fetch(drawn))
        times.append(time.perf_counter() - begin)
    return median(times)


def _captured(forward: Callable[[], None]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(_WARM_UPS):
            forward()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        forward()
    return graph.replay
