"""`python -m bench [NAME ...]`: measure, print, and write to docs/benchmarks/."""

import sys

from bench import attention, gated_delta, gateway, kv_formats, linear, perplexity, streams, tiny, tool_stream

BENCHES = {
    "attention": attention.main,
    "gated-delta": gated_delta.main,
    "gateway": gateway.main,
    "kv-formats": kv_formats.main,
    "linear": linear.main,
    "perplexity": perplexity.main,
    "streams": streams.main,
    "tiny": tiny.main,
    "tool-stream": tool_stream.main,
}


def main(names: list[str]) -> int:
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
