"""`python -m bench [NAME ...]`: measure, print, and write to docs/benchmarks/.

Those of WITH_OPTIONS take options, and then no other name beside them: `python -m bench engine --help`."""

import sys

from bench import (
    attention,
    draft_samples,
    engine,
    gated_delta,
    gated_delta_prefill,
    gateway,
    judges,
    kv_formats,
    kv_needles,
    linear,
    memory,
    perplexity,
    sampling,
    serve_packed,
    small_kernels,
    soak,
    streams,
    tiny,
    tool_stream,
)

BENCHES = {
    "attention": attention.main,
    "engine": engine.main,
    "gated-delta": gated_delta.main,
    "gated-delta-prefill": gated_delta_prefill.main,
    "gateway": gateway.main,
    "judges": judges.main,
    "kv-formats": kv_formats.main,
    "kv-needles": kv_needles.main,
    "linear": linear.main,
    "perplexity": perplexity.main,
    "sampling": sampling.main,
    "small-kernels": small_kernels.main,
    "streams": streams.main,
    "tiny": tiny.main,
    "tiny-drafts": draft_samples.main,
    "tool-stream": tool_stream.main,
}

WITH_OPTIONS = {
    "engine": engine.main,
    "judges": judges.main,
    "memory": memory.main,
    "serve-packed": serve_packed.main,
    "soak": soak.main,
}


def main(names: list[str]) -> int:
    if names and names[0] in WITH_OPTIONS:
        WITH_OPTIONS[names[0]](names[1:])
        return 0
    unknown = [name for name in names if name not in BENCHES]
    if unknown:
        print(f"no bench is called {', '.join(unknown)}; there are: {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    for name in names or BENCHES:
        print(f"== {name}")
        BENCHES[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
