"""`python -m bench.needles DEVICE LENGTH:SALTS ...`: needle-test of PyPI's cache-pressure against the small model.

For example `cuda 128000:20 200000:5`. Prints a line a length. Needs cache-pressure (Python 3.12) installed. Four
prompts run at once, and pages and host tier hold them all.
"""

import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import median

from bench.stack import running

TOKENS_PER_CHAR = "0.3648"
"""Of needle-test's text under the small model's tokenizer."""
TOGETHER = 4
PAGES = "24000"
_LINE = re.compile(r"\d+K: (\w+)\s+prompt=([\d,]+).*?ttft=([\d.]+)s")


@dataclass(frozen=True, slots=True)
class Needle:
    verdict: str
    """PASS, or what needle-test says else."""
    prompt: int
    """Tokens."""
    ttft: float
    """Seconds."""


def needle(url: str, length: int, salt: int) -> Needle:
    program = "from cache_pressure.needle import main; main()"
    options = {
        "base-url": f"{url}/v1",
        "model": "samovar-tiny",
        "lengths": str(length),
        "max-tokens": "48",
        "tokens-per-char": TOKENS_PER_CHAR,
        "salt": str(salt),
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    found = _LINE.search(done.stdout)
    if found is None:
        return Needle(f"no verdict: {done.stdout[-200:]}{done.stderr[-200:]}", 0, 0.0)
    return Needle(found[1], int(found[2].replace(",", "")), float(found[3]))


def main(device: str, *plan: str) -> None:
    model = ("--model", "models/samovar-tiny", "--kv-size", "8GiB", "--device", device)
    # Kernels that tune themselves take a minute on a GPU.
    with (
        running(*model, SAMOVAR_KV_PAGES=PAGES, SAMOVAR_START_TIMEOUT="240") as url,
        ThreadPoolExecutor(TOGETHER) as pool,
    ):
        for length, salts in (part.split(":") for part in plan):
            rounds = range(1, int(salts) + 1)
            needles = list(pool.map(lambda salt, length=length: needle(url, int(length), salt), rounds))
            passed = sum(each.verdict == "PASS" for each in needles)
            print(
                f"{length}: {passed} of {len(needles)}, median TTFT {median(each.ttft for each in needles):.1f} s",
                flush=True,
            )
            for each in needles:
                if each.verdict != "PASS":
                    print(f"  {each}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
